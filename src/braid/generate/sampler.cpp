// Temperature and nucleus sampling.
#include "braid/generate/sampler.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "braid/core/check.h"

namespace braid {

Sampler::Sampler(const SamplingOptions& options, std::int64_t num_rows) : options_(options) {
  BRAID_CHECK(options.temperature >= 0 && std::isfinite(options.temperature), "temperature is ",
              options.temperature, ", expected at least 0");
  BRAID_CHECK(options.top_p > 0 && options.top_p <= 1, "top_p is ", options.top_p,
              ", expected above 0 and at most 1");
  for (std::int64_t row = 0; row < num_rows; ++row) {
    std::seed_seq seed{options.seed & 0xffffffffU, options.seed >> 32U,
                       static_cast<std::uint64_t>(row)};
    generators_.emplace_back(seed);
  }
}

at::Tensor Sampler::choose(const at::Tensor& logits) {
  BRAID_CHECK_EQ(logits.size(0), std::ssize(generators_), "sampler: rows of the logits");
  const at::Tensor rows = logits.contiguous();
  auto [largest, tokens] = rows.max(1);
  TORCH_CHECK(at::isfinite(largest).all().item<bool>(),
              "the model gives logits that are not finite; its weights may be damaged");
  if (options_.temperature == 0) return tokens;
  for (std::int64_t row = 0; row < rows.size(0); ++row)
    tokens.mutable_data_ptr<std::int64_t>()[row] =
        draw(rows.const_data_ptr<float>() + row * rows.size(1), rows.size(1),
             largest.const_data_ptr<float>()[row], generators_[static_cast<std::size_t>(row)]);
  return tokens;
}

std::int64_t Sampler::draw(const float* logits, std::int64_t vocab_size, double largest,
                           std::mt19937_64& generator) {
  using Candidate = std::pair<double, std::int64_t>;  // probability times a constant, minus the id
  std::vector<Candidate> candidates;
  double total = 0;
  for (std::int64_t id = 0; id < vocab_size; ++id) {
    const double p = std::exp((static_cast<double>(logits[id]) - largest) / options_.temperature);
    candidates.emplace_back(p, -id);
    total += p;
  }
  if (options_.top_p < 1) {  // moves the nucleus from the front of a heap to the vector's end
    const double enough = options_.top_p * total;
    total = 0;
    auto end = candidates.end();
    std::make_heap(candidates.begin(), end);
    while (total < enough && end != candidates.begin()) {
      std::pop_heap(candidates.begin(), end);
      total += (--end)->first;
    }
    candidates.erase(candidates.begin(), end);
  }
  double left = total * (static_cast<double>(generator() >> 11U) * 0x1p-53);
  for (const auto& [p, minus_id] : candidates) {
    left -= p;
    if (left < 0) return -minus_id;
  }
  // Rounding has left a little: the most probable token of those that there are.
  return -std::max_element(candidates.begin(), candidates.end())->second;
}

}  // namespace braid
