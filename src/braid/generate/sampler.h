// Chooses the next token of each sequence from its logits.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <random>
#include <vector>

namespace braid {

struct SamplingOptions {
  double temperature = 0;  // divides the logits; 0: the most probable token, always
  double top_p = 1;        // in (0, 1]
  std::uint64_t seed = 1234;
};

/// With a temperature above 0 a token is drawn from the nucleus: the fewest most probable tokens
/// whose probabilities sum to at least top_p, of equal ones the lower ids. What a row draws depends
/// on the seed, its number and its logits alone, whatever other rows there are.
class Sampler {
 public:
  /// Errors: ValueError: temperature below 0 or not finite, top_p not in (0, 1].
  Sampler(const SamplingOptions& options, std::int64_t num_rows);

  ///   Shapes  logits [num_rows, V] f32; returns [num_rows] int64
  ///   Errors  c10::Error: a logit is not a number, or the largest is not finite
  at::Tensor choose(const at::Tensor& logits);

 private:
  std::int64_t draw(const float* logits, std::int64_t vocab_size, double largest,
                    std::mt19937_64& generator);

  SamplingOptions options_;
  std::vector<std::mt19937_64> generators_;  // of the rows
};

}  // namespace braid
