// Which way an operation runs: the caller's mode, or in mode automatic the fastest one as measured
// by all ranks together.
//
// NOTE [table]. Choices are kept per thread (a rank) under a key such as
// "matmul_all_reduce m=1024 n=1024 k=4096 f32 ranks=2 host", where m is the rows of the whole
// product rounded up to a power of two, so that a token count that changes at every call is not
// measured at every call; n and k are of the whole product; and "host" (shared memory) or
// "network" is where the ranks are. Values are plans (ops/plan.h). A person may edit them, and may
// put * for any field of a key: such a pin goes before measured choices, the one with the fewest *
// first. Every pass looks its own operation up: forward, input gradient and weight gradient.
// The ranks of a group agree at the first use of a key: what rank 0 knows counts, or they measure.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "braid/comm/group.h"
#include "braid/ops/collective_matmul.h"
#include "braid/ops/plan.h"

namespace braid::tuner {

/// What the choice depends on; the same on all ranks. m, n, k are of the whole product.
struct Key {
  const char* op;
  std::int64_t m, n, k;
  at::ScalarType dtype;
  bool reduces = false;     // sums over ranks: a ring is among the candidates
  bool has_native = false;  // half types: their own matmul is, too
};

/// How to run. In mode automatic, for a key that rank 0 of the group does not know: measured, if live
/// tuning is on, by running `trial(plan)` several times for each candidate, interleaved, median of
/// the slowest rank; else, and while another operation of the group is in flight, by a rule of thumb,
/// which is not among the choices().
///   Order   collective in mode automatic
///   Errors  ValueError: num_chunks of mode chunked is below 1; in mode automatic, at the first use of a
///           key, the same on all ranks: their m, n, k or types differ.
///           c10::OutOfMemoryError when no candidate fits into a slot (NOTE [disagreement] in comm/shared_memory.h)
Plan choose(const Group& group, const Key& key, const MatmulOptions& options,
            const std::function<void(const Plan&)>& trial);

/// The plans that mode automatic chooses from, those with fewer tiles first. (A ring is for one host, and sums in f32.)
std::vector<Plan> candidates(const Group& group, const Key& key);

/// Live tuning of this thread (a rank), on by default; --deterministic turns it off.
void allow_live(bool on);

/// As keys have it: f32, bf16, fp16; other types by their ATen name.
const char* dtype_name(at::ScalarType dtype);

/// What was measured in this thread, or set: {key: plan}. Goes into a checkpoint, but for the pins.
nlohmann::json choices(bool with_pins = false);
/// Of these what was measured in this thread since forget_measured(). Goes into the tuner file (ops/tuner_file.h).
nlohmann::json measured();
void forget_measured();
/// The plans that mode automatic has run in this thread, one for each group and key.
std::vector<Plan> plans_in_use();
/// Whether a key has a * in it.
bool is_pin(const std::string& key);
/// The pins that were set and that no operation of this thread was run by.
std::vector<std::string> unused_pins();
/// Empties this thread's table. As set_choices: all ranks at the same point.
void forget_choices();
/// Errors: ValueError when it is not an object {key: plan}.
void check_choices(const nlohmann::json& choices);
/// Adds choices made before, from the next use of their keys on: all ranks of a group at the same
/// point of their program. Errors: as check_choices.
void set_choices(const nlohmann::json& choices);

}  // namespace braid::tuner
