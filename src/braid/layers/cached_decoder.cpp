// The decoder's layers on new tokens only: no autograd, few allocations, the row kernels and products of training.
#include "braid/layers/cached_decoder.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "braid/comm/collectives.h"
#include "braid/core/check.h"
#include "braid/layers/attention.h"
#include "braid/layers/embedding.h"
#include "braid/layers/row_kernels.h"
#include "braid/ops/tile_matmul.h"

namespace braid {
namespace {

using Counts = std::vector<std::int64_t>;

/// x becomes x + delta (where there is a delta); gives the normalised sum.
at::Tensor add_and_normalise(at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight,
                             double epsilon) {
  at::Tensor norm = at::empty_like(x), inverse_rms = at::empty({x.size(0)}, at::kFloat);
  row_kernels::add_rms_norm(x, delta, weight, epsilon, x, norm, inverse_rms);
  return norm;
}

}  // namespace

CachedDecoder::CachedDecoder(const Transformer& model, std::int64_t num_sequences,
                             std::int64_t max_length)
    : model_(model), max_length_(max_length) {
  BRAID_CHECK(num_sequences > 0 && max_length > 0, "decoder: sequences are ", num_sequences,
              " of at most ", max_length, " tokens, both must be positive");
  const c10::InferenceMode inference;
  const auto& config = model.config();
  lengths_.resize(static_cast<std::size_t>(num_sequences));
  rotary_ = rotary_table(max_length, config.kv_channels, config.rotary_base);
  const auto options = at::TensorOptions(attention_type(model.options_.dtype));
  for (std::int64_t i = 0; i < config.num_layers; ++i)
    caches_.push_back(at::zeros(
        {2 * model.groups_.length, num_sequences * max_length, config.kv_channels}, options));
  mask_ = at::full({num_sequences, max_length}, -std::numeric_limits<double>::infinity(), options);
}

at::Tensor CachedDecoder::prefill(const std::vector<std::vector<std::int64_t>>& prompts) {
  const c10::InferenceMode inference;
  BRAID_CHECK_EQ(prompts.size(), lengths_.size(), "decoder: prompts and sequences");
  BRAID_CHECK_EQ(lengths_[0], 0, "decoder: tokens before the prefill and 0");
  Counts counts;
  std::vector<std::int64_t> tokens;
  for (const auto& prompt : prompts) {
    BRAID_CHECK(!prompt.empty(), "decoder: prompt ", counts.size(), " is empty");
    counts.push_back(std::ssize(prompt));
    tokens.insert(tokens.end(), prompt.begin(), prompt.end());
  }
  return run(at::tensor(tokens, at::kLong), counts);
}

at::Tensor CachedDecoder::step(const at::Tensor& tokens) {
  const c10::InferenceMode inference;
  BRAID_CHECK(lengths_[0] > 0, "decoder: a step before the prefill");
  BRAID_CHECK(tokens.dim() == 1 && tokens.size(0) == std::ssize(lengths_), "decoder: tokens are ",
              tokens.sizes(), ", expected one for each of ", lengths_.size(), " sequences");
  return run(tokens, Counts(lengths_.size(), 1));
}

at::Tensor CachedDecoder::column_product(std::size_t weight, const at::Tensor& x) const {
  const auto int8 = model_.int8_weights_.find(weight);
  if (int8 != model_.int8_weights_.end()) return multiply_whole(x, int8->second, {});
  return multiply_whole(x, model_.parameters_[weight].value, {});
}

at::Tensor CachedDecoder::row_product(std::size_t weight, const at::Tensor& x) const {
  const Parameter& parameter = model_.parameters_[weight];
  const auto& group = model_.options_.group;
  if (!group || group->size() == 1) return column_product(weight, x);
  MatmulOptions options = model_.options_.matmul;
  options.whole_features = parameter.parts[0].shape[1];
  const auto int8 = model_.int8_weights_.find(weight);
  return int8 == model_.int8_weights_.end()
             ? matmul_all_reduce(*group, x, parameter.value, {}, options)
             : matmul_all_reduce(*group, x, int8->second, {}, options);
}

at::Tensor CachedDecoder::attend_to_prompts(const at::Tensor& heads, const Counts& counts) const {
  const auto h = model_.heads_.length, g = model_.groups_.length, t = heads.size(2),
             d = heads.size(3);
  at::Tensor context = at::empty({t, h, d}, heads.options());
  std::int64_t begin = 0;
  for (const auto n : counts) {
    const at::Tensor own = heads.narrow(2, begin, n);
    const auto out = std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(
        own.narrow(1, 0, h), own.narrow(1, h, g), own.narrow(1, h + g, g), 0.0,
        /*is_causal=*/true));
    context.narrow(0, begin, n).copy_(out[0].transpose(0, 1));
    begin += n;
  }
  return context.view({t, h * d});
}

at::Tensor CachedDecoder::attend_to_cache(const at::Tensor& heads, const at::Tensor& cache) const {
  const auto h = model_.heads_.length, g = model_.groups_.length, b = heads.size(2),
             d = heads.size(3);
  const auto [least, most] = std::minmax_element(lengths_.begin(), lengths_.end());
  // A product for each query group of each sequence: its heads read their keys once, which they don't in ATen's
  // flash attention.
  const at::Tensor queries =
      heads[0].narrow(0, 0, h).view({g, h / g, b, d}).transpose(1, 2).reshape({g * b, h / g, d});
  const at::Tensor kept = cache.view({2 * g * b, max_length_, d}).narrow(1, 0, *most);
  at::Tensor scores = at::bmm(queries, kept.narrow(0, 0, g * b).transpose(1, 2));
  scores.mul_(1 / std::sqrt(static_cast<double>(d)));
  if (*least != *most)
    scores.view({g, b, h / g, *most}).add_(mask_.narrow(1, 0, *most).unsqueeze(1));
  const at::Tensor weights = at::softmax(scores, -1, at::kFloat).to(scores.scalar_type());
  const at::Tensor context = at::bmm(weights, kept.narrow(0, g * b, g * b));  // [g * b, h / g, d]
  return context.view({g, b, h / g * d}).transpose(0, 1).reshape({b, h * d});
}

at::Tensor CachedDecoder::run(const at::Tensor& tokens, const Counts& counts) {
  const auto& config = model_.config_;
  const auto& group = model_.options_.group;
  const auto t = tokens.size(0), h = model_.heads_.length, g = model_.groups_.length;
  for (std::size_t i = 0; i < counts.size(); ++i)
    BRAID_CHECK(lengths_[i] + counts[i] <= max_length_, "decoder: sequence ", i, " would have ",
                lengths_[i] + counts[i], " tokens, it can hold ", max_length_);

  const auto& table = model_.parameters_[model_.embedding_];
  at::Tensor x = vocab_parallel_embedding(tokens, table.value, config.vocab_size,
                                          {.group = group, .main_grad = {}});

  // Of each row: its position, and its place in the caches.
  std::vector<std::int64_t> positions, slots, last_rows;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const auto sequence = static_cast<std::int64_t>(i);
    mask_[sequence].narrow(0, lengths_[i], counts[i]).zero_();
    for (std::int64_t j = 0; j < counts[i]; ++j) {
      positions.push_back(lengths_[i] + j);
      slots.push_back(sequence * max_length_ + positions.back());
    }
    last_rows.push_back(std::ssize(positions) - 1);
  }
  const bool is_prefill = lengths_[0] == 0;
  for (std::size_t i = 0; i < counts.size(); ++i) lengths_[i] += counts[i];
  const at::Tensor rows = at::tensor(positions, at::kLong), places = at::tensor(slots, at::kLong);
  const at::Tensor cosine = rotary_.cosine.index_select(0, rows),
                   sine = rotary_.sine.index_select(0, rows);

  const auto norm = [&](std::size_t i, const at::Tensor& delta) {
    return add_and_normalise(x, delta, model_.parameters_[i].value, config.norm_epsilon);
  };
  at::Tensor delta;
  for (std::size_t i = 0; i < caches_.size(); ++i) {
    const auto& layer = model_.layers_[i];
    const at::Tensor qkv = column_product(layer.qkv, norm(layer.input_norm, delta));
    at::Tensor heads = at::empty({1, h + 2 * g, t, config.kv_channels}, caches_[i].options());
    row_kernels::rotate_to_heads(qkv, cosine, sine, h + g, heads);
    caches_[i].index_copy_(1, places, heads[0].narrow(0, h, 2 * g));
    const at::Tensor context =
        is_prefill ? attend_to_prompts(heads, counts) : attend_to_cache(heads, caches_[i]);
    delta = row_product(layer.o, context.to(x.scalar_type()));
    const at::Tensor gate_up = column_product(layer.gate_up, norm(layer.post_norm, delta));
    at::Tensor y = at::empty({t, gate_up.size(1) / 2}, gate_up.options());
    row_kernels::swiglu(gate_up, y);
    delta = row_product(layer.down, y);
  }
  if (is_prefill) {
    const at::Tensor last = at::tensor(last_rows, at::kLong);
    x = x.index_select(0, last);
    delta = delta.index_select(0, last);
  }
  at::Tensor logits = column_product(model_.output_, norm(model_.final_norm_, delta));
  if (group && group->size() > 1)
    logits = all_gather(*group, logits.t(), split_rows(config.vocab_size, group->size())).t();
  return logits.to(at::kFloat);
}

}  // namespace braid
