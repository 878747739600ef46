// What `braid bench` measures. All times are seconds, of the slowest rank, the median of interleaved rounds.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "braid/comm/group.h"
#include "braid/comm/place.h"
#include "braid/train/config.h"
#include "braid/train/trainer.h"

namespace braid::cli {

/// One way to do the work that is compared.
struct Candidate {
  std::string name;
  std::function<void()> run;
};

/// The time of one call of each candidate, the median of rounds of braid::time_interleaved after one
/// to warm up. Order: collective.
std::vector<double> time_interleaved(const Group& group, const std::vector<Candidate>& candidates,
                                     int rounds, int calls = 1);

struct OpCase {
  std::string op;  // all_gather_matmul, matmul_reduce_scatter or matmul_all_reduce
  std::int64_t m = 0, n = 0, k = 0;  // of the whole product
  at::ScalarType dtype = at::kFloat;
};

/// Measures operations in every way there is, beside the matmul alone (at::mm in that type), the
/// communication alone and c10d's own collective over Gloo.
///   rounds  of each case; fewer, but at least 5, for cases that take longer than some seconds;
///           plans that take twice as long as a long best one are timed once
///   json    one line a case: op, m, n, k, dtype, ranks; seconds: gemm_s, serial_gloo_s, serial_s
///           and fused_s (the faster half form), auto_s and auto_again_s (the same once more: what
///           they differ by is noise), auto_mode, one <plan>_s for every candidate of auto, best_mode
///   Order   collective
void bench_ops(const std::vector<OpCase>& cases, int rounds, bool json, const Place& place);

/// The standing sweep: every op, type, number of rows and weight.
std::vector<OpCase> standing_sweep();

/// Measures products with an int8 weight [n, k] (bf16 rows, a scale per channel and per group of
/// 128) beside at::mm in bf16, fp16 and f32, in turn, on one core.
void bench_int8(std::int64_t n, std::int64_t k, int rounds, bool json);

/// Batches of random tokens, others on every data-parallel rank.
Trainer::BatchSource random_batches(const TrainConfig& config, int dp_rank);

/// Measures a training step, with random tokens. Order: collective.   config  validated
void bench_step(const TrainConfig& config, const Place& place, bool json);

}  // namespace braid::cli
