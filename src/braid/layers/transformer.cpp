// The decoder: its parameters with their slices, and its passes.
#include "braid/layers/transformer.h"

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "braid/core/check.h"
#include "braid/layers/embedding.h"
#include "braid/layers/recompute.h"

namespace braid {
namespace {

/// FNV-1a: the same number for a name on every machine.
std::uint64_t hash_of(const std::string& name) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const unsigned char c : name) hash = (hash ^ c) * 0x100000001b3U;
  return hash;
}

}  // namespace

Transformer::Transformer(const LlamaConfig& config, const TransformerOptions& options)
    : config_(config), options_(options) {
  check();
  const auto h = config_.hidden_size, d = config_.kv_channels, f = config_.ffn_hidden_size,
             v = config_.vocab_size;
  const auto heads_per_group = config_.num_attention_heads / config_.num_query_groups;
  groups_ = own_part(options_.group, config_.num_query_groups);
  heads_ = {groups_.begin * heads_per_group, groups_.length * heads_per_group};
  ffn_ = own_part(options_.group, f);
  vocab_ = own_part(options_.group, v);
  const auto q_rows = config_.num_attention_heads * d, kv_rows = config_.num_query_groups * d;

  embedding_ = add("model.embed_tokens.weight",
                   {{"model.embed_tokens.weight", {v, h}, 0, vocab_.begin, vocab_.length}}, false);
  for (std::int64_t i = 0; i < config_.num_layers; ++i) {
    const auto prefix = fmt::format("model.layers.{}.", i);
    const auto attention = prefix + "self_attn.", mlp = prefix + "mlp.";
    Layer layer{};
    layer.input_norm =
        add(prefix + "input_layernorm.weight", {{prefix + "input_layernorm.weight", {h}}}, true);
    layer.qkv =
        add(attention + "qkv_proj.weight",
            {{attention + "q_proj.weight", {q_rows, h}, 0, heads_.begin * d, heads_.length * d},
             {attention + "k_proj.weight", {kv_rows, h}, 0, groups_.begin * d, groups_.length * d},
             {attention + "v_proj.weight", {kv_rows, h}, 0, groups_.begin * d, groups_.length * d}},
            false);
    layer.o =
        add(attention + "o_proj.weight",
            {{attention + "o_proj.weight", {h, q_rows}, 1, heads_.begin * d, heads_.length * d}},
            false);
    layer.post_norm = add(prefix + "post_attention_layernorm.weight",
                          {{prefix + "post_attention_layernorm.weight", {h}}}, true);
    layer.gate_up = add(mlp + "gate_up_proj.weight",
                        {{mlp + "gate_proj.weight", {f, h}, 0, ffn_.begin, ffn_.length},
                         {mlp + "up_proj.weight", {f, h}, 0, ffn_.begin, ffn_.length}},
                        false);
    layer.down = add(mlp + "down_proj.weight",
                     {{mlp + "down_proj.weight", {h, f}, 1, ffn_.begin, ffn_.length}}, false);
    layers_.push_back(layer);
  }
  final_norm_ = add("model.norm.weight", {{"model.norm.weight", {h}}}, true);
  output_ = config_.untie_embeddings_and_output_weights
                ? add("lm_head.weight",
                      {{"lm_head.weight", {v, h}, 0, vocab_.begin, vocab_.length}}, false)
                : embedding_;
}

void Transformer::check() const {
  const auto positive = [](std::int64_t value, const char* what) {
    BRAID_CHECK(value > 0, what, " is ", value, ", must be positive");
  };
  positive(config_.hidden_size, "hidden_size");
  positive(config_.num_layers, "num_layers");
  positive(config_.ffn_hidden_size, "ffn_hidden_size");
  positive(config_.num_attention_heads, "num_attention_heads");
  positive(config_.num_query_groups, "num_query_groups");
  positive(config_.kv_channels, "kv_channels");
  positive(config_.vocab_size, "vocab_size");
  positive(options_.recompute_num_layers, "recompute_num_layers");
  BRAID_CHECK(config_.num_attention_heads % config_.num_query_groups == 0, "num_attention_heads ",
              config_.num_attention_heads, " doesn't divide by num_query_groups ",
              config_.num_query_groups);
  BRAID_CHECK(config_.kv_channels % 2 == 0, "kv_channels is ", config_.kv_channels,
              ", must be even");
  const auto num_ranks = options_.group ? options_.group->size() : 1;
  const auto enough = [&](std::int64_t value, const char* what) {
    BRAID_CHECK(value >= num_ranks, what, " is ", value, ", fewer than the ", num_ranks,
                " tensor-parallel ranks");
  };
  enough(config_.num_query_groups, "num_query_groups");
  enough(config_.ffn_hidden_size, "ffn_hidden_size");
  enough(config_.vocab_size, "vocab_size");
  BRAID_CHECK(options_.dtype == at::kFloat || options_.dtype == at::kBFloat16, "dtype is ",
              options_.dtype, ", must be Float or BFloat16");
}

at::Tensor Transformer::whole_weight(const Part& part) const {
  auto generator = at::detail::createCPUGenerator(options_.seed ^ hash_of(part.name));
  return at::empty(part.shape, at::kFloat).normal_(0.0, config_.init_method_std, generator);
}

std::size_t Transformer::add(std::string name, std::vector<Part> parts, bool is_norm) {
  const at::NoGradGuard no_grad;
  Parameter parameter;
  parameter.name = std::move(name);
  if (!options_.trainable) {
    auto shape = parts.at(0).shape;
    if (!is_norm) {
      shape[static_cast<std::size_t>(parts[0].dim)] = 0;
      for (const auto& part : parts) shape[static_cast<std::size_t>(part.dim)] += part.length;
    }
    parameter.main = at::zeros(shape, options_.dtype);
  } else if (is_norm) {
    parameter.main = at::ones(parts.at(0).shape, at::kFloat);
  } else {
    std::vector<at::Tensor> slices;
    for (const auto& part : parts)
      slices.push_back(whole_weight(part).narrow(part.dim, part.begin, part.length));
    parameter.main = at::cat(slices);
  }
  parameter.value = parameter.main.to(options_.dtype);  // the same tensor where that is its type
  if (options_.trainable) {
    parameter.value.set_requires_grad(true);
    parameter.main_grad = at::zeros_like(parameter.main, at::kFloat);
  }
  parameter.parts = std::move(parts);
  const bool split = options_.group && options_.group->size() > 1;
  parameter.sharded = !is_norm && split;
  parameter.grad_partial_over_tp = is_norm && split && options_.sequence_parallel;
  parameter.weight_decay = !is_norm;
  parameters_.push_back(std::move(parameter));
  return parameters_.size() - 1;
}

LinearOptions Transformer::linear_options(const Parameter& weight, std::int64_t num_tokens) const {
  LinearOptions options{options_.group,         options_.sequence_parallel, options_.matmul,
                        options_.keep_gathered, weight.main_grad,           {}};
  if (options_.sequence_parallel && options_.group)
    options.rows = split_rows(num_tokens, options_.group->size());
  for (const Part& part : weight.parts)
    options.matmul.whole_features += part.shape[static_cast<std::size_t>(part.dim)];
  return options;
}

NormOptions Transformer::norm_options(const Parameter& weight) const {
  return {config_.norm_epsilon, weight.main_grad};
}

Transformer::Stream Transformer::run_layer(const Layer& layer, const Stream& in, std::int64_t s,
                                           std::int64_t b) const {
  const auto norm = [&](std::size_t i, const Stream& stream) {
    const Parameter& weight = parameters_[i];
    return add_rms_norm(stream.x, stream.delta, weight.value, norm_options(weight));
  };
  const auto column = [&](std::size_t i, const at::Tensor& x) {
    return column_parallel_linear(x, parameters_[i].value, {},
                                  linear_options(parameters_[i], s * b));
  };
  const auto row = [&](std::size_t i, const at::Tensor& x) {
    return row_parallel_linear(x, parameters_[i].value, {}, linear_options(parameters_[i], s * b));
  };
  auto residual = norm(layer.input_norm, in);
  const auto context =
      rotary_causal_attention(column(layer.qkv, residual.norm), rotary_,
                              {b, heads_.length, groups_.length, config_.kv_channels});
  residual = norm(layer.post_norm, {residual.sum, row(layer.o, context)});
  return {residual.sum, row(layer.down, swiglu(column(layer.gate_up, residual.norm)))};
}

Transformer::Stream Transformer::run_layers(std::size_t begin, std::size_t end, Stream stream,
                                            std::int64_t s, std::int64_t b) const {
  for (std::size_t i = begin; i < end; ++i) stream = run_layer(layers_[i], stream, s, b);
  return stream;
}

Transformer::Stream Transformer::run_recomputed(std::size_t begin, std::size_t end,
                                                const Stream& in, std::int64_t s,
                                                std::int64_t b) const {
  const Block block = [this, begin, end, s, b](const std::vector<at::Tensor>& inputs) {
    auto out =
        run_layers(begin, end, {inputs.at(0), inputs.size() > 1 ? inputs[1] : at::Tensor()}, s, b);
    return std::vector<at::Tensor>{out.x, out.delta};
  };
  const auto& weights = parameters_;
  const auto trained = std::find_if(weights.begin(), weights.end(),
                                    [](const auto& p) { return p.value.requires_grad(); });
  std::vector<at::Tensor> inputs{in.x};
  if (in.delta.defined()) inputs.push_back(in.delta);
  auto out = recomputed(block, inputs, trained == weights.end() ? at::Tensor() : trained->value);
  return {out.at(0), out.at(1)};
}

void Transformer::quantize_weights() {
  BRAID_CHECK(!options_.trainable, "transformer: int8 weights are not for a trainable model");
  std::vector<std::size_t> positions{output_};
  for (const Layer& layer : layers_)
    positions.insert(positions.end(), {layer.qkv, layer.o, layer.gate_up, layer.down});
  for (const std::size_t i : positions) {
    Parameter& weight = parameters_[i];
    int8_weights_.emplace(i, quantize_weight(weight.value));
    if (i != embedding_) weight.value = weight.main = at::empty({0}, weight.value.options());
  }
}

at::Tensor Transformer::sharded_logits(const at::Tensor& tokens) {
  BRAID_CHECK(int8_weights_.empty(), "transformer: its weights are int8, CachedDecoder uses them");
  BRAID_CHECK_EQ(tokens.dim(), 2, "transformer: tokens [s, b], dims");
  const auto s = tokens.size(0), b = tokens.size(1);
  if (!rotary_.cosine.defined() || rotary_.cosine.size(0) < s) {
    rotary_ = rotary_table(s, config_.kv_channels, config_.rotary_base);
  }
  const auto& table = parameters_[embedding_];
  Stream stream{
      vocab_parallel_embedding(tokens.reshape({-1}), table.value, config_.vocab_size,
                               {options_.group, options_.sequence_parallel, table.main_grad}),
      {}};
  const auto num_layers = layers_.size();
  const auto group = static_cast<std::size_t>(options_.recompute_num_layers);
  switch (options_.recompute_method) {
    case RecomputeMethod::none:
      stream = run_layers(0, num_layers, stream, s, b);
      break;
    case RecomputeMethod::uniform:
      for (std::size_t i = 0; i < num_layers; i += group) {
        stream = run_recomputed(i, std::min(i + group, num_layers), stream, s, b);
      }
      break;
    case RecomputeMethod::block:
      for (std::size_t i = 0; i < std::min(group, num_layers); ++i)
        stream = run_recomputed(i, i + 1, stream, s, b);
      stream = run_layers(std::min(group, num_layers), num_layers, stream, s, b);
      break;
  }
  const auto& weight = parameters_[final_norm_];
  const auto norm = add_rms_norm(stream.x, stream.delta, weight.value, norm_options(weight)).norm;
  return column_parallel_linear(norm, parameters_[output_].value, {},
                                linear_options(parameters_[output_], s * b));
}

at::Tensor Transformer::forward(const at::Tensor& tokens, const at::Tensor& labels) {
  BRAID_CHECK_EQ(tokens.sizes(), labels.sizes(), "transformer: shapes of tokens and labels");
  return vocab_parallel_cross_entropy(sharded_logits(tokens), labels.reshape({-1}),
                                      config_.vocab_size, options_.group);
}

at::Tensor Transformer::logits(const at::Tensor& tokens) {
  const at::NoGradGuard no_grad;
  at::Tensor logits = sharded_logits(tokens);
  if (options_.group && options_.group->size() > 1) {
    logits = all_gather(*options_.group, logits.t(),
                        split_rows(config_.vocab_size, options_.group->size()))
                 .t();
  }
  return logits.reshape({tokens.size(0), tokens.size(1), config_.vocab_size});
}

}  // namespace braid
