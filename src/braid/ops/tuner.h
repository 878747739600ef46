// Which way an operation runs: the caller's mode, or in mode automatic the fastest one as measured
// by all ranks together.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "braid/comm/group.h"
#include "braid/ops/collective_matmul.h"

namespace braid::tuner {

/// What the choice depends on; the same on all ranks. m, n, k are of the whole product.
struct Key {
  const char* op;
  std::int64_t m, n, k;
  at::ScalarType dtype;
};

/// The number of chunks to run with: 0 is fused, 1 serial. In mode automatic, for a key not yet in
/// this thread's table: measured, if live tuning is on, by running `trial(num_chunks)` several
/// times for each candidate, interleaved, median of the slowest rank; else by a rule of thumb.
///   Order   collective in mode automatic
///   Errors  ValueError when num_chunks of mode chunked is below 1
int choose(const Group& group, const Key& key, const MatmulOptions& options,
           const std::function<void(int)>& trial);

/// Live tuning of this thread (a rank), on by default; --deterministic turns it off.
void allow_live(bool on);

/// This thread's choices, as they go into a checkpoint: {"<op> <m> <n> <k>
/// <dtype> <ranks> <locality>": num_chunks}.
nlohmann::json choices();
/// Adds choices made before. Errors: ValueError when it is not such an object.
void set_choices(const nlohmann::json& choices);

}  // namespace braid::tuner
