// The parameters of a small Llama as one tp rank holds them, with values that differ by tensor and index.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "braid/comm/collectives.h"
#include "braid/train/checkpoint.h"
#include "tests/support/ranks.h"

namespace braid::test {

struct ToyShape {
  std::int64_t vocab = 10, hidden = 16, ffn = 24, heads = 4, kv_heads = 2, layers = 2;
  bool tied = false;
};

/// What stands in the whole tensor `name`; kind: 0 weights, 1 and 2 moments, 3 main weights.
inline at::Tensor whole_values(const std::string& name, at::IntArrayRef shape, int kind) {
  int sum = 0;
  for (const char c : name) sum = (sum * 31 + c) % 1000;
  return rank_values(4 * sum + kind, shape) * 0.1;
}

class ToyModel {
 public:
  ToyModel(int rank, int size, at::ScalarType dtype = at::kFloat, ToyShape shape = {})
      : rank_(rank), size_(size), dtype_(dtype), shape_(shape) {
    const std::int64_t width = shape.hidden / shape.heads;
    add({rows("model.embed_tokens.weight", {shape.vocab, shape.hidden},
              split_rows(shape.vocab, size))},
        1);
    for (std::int64_t i = 0; i < shape.layers; ++i) {
      const std::string layer = "model.layers." + std::to_string(i) + ".";
      add({whole(layer + "input_layernorm.weight", {shape.hidden})});
      // Each rank of a part of the query heads also has their key and value heads; several ranks
      // may have the same.
      const std::int64_t kv_ranks = std::min<std::int64_t>(size, shape.kv_heads),
                         kv_rank = rank * kv_ranks / size;
      const std::int64_t kv = shape.kv_heads * width;
      add({even(layer + "self_attn.q_proj.weight", {shape.hidden, shape.hidden}, 0, rank, size),
           even(layer + "self_attn.k_proj.weight", {kv, shape.hidden}, 0, kv_rank, kv_ranks),
           even(layer + "self_attn.v_proj.weight", {kv, shape.hidden}, 0, kv_rank, kv_ranks)});
      add({even(layer + "self_attn.o_proj.weight", {shape.hidden, shape.hidden}, 1, rank, size)});
      add({whole(layer + "post_attention_layernorm.weight", {shape.hidden})});
      add({even(layer + "mlp.gate_proj.weight", {shape.ffn, shape.hidden}, 0, rank, size),
           even(layer + "mlp.up_proj.weight", {shape.ffn, shape.hidden}, 0, rank, size)});
      add({even(layer + "mlp.down_proj.weight", {shape.hidden, shape.ffn}, 1, rank, size)});
    }
    add({whole("model.norm.weight", {shape.hidden})});
    if (!shape.tied)
      add({rows("lm_head.weight", {shape.vocab, shape.hidden}, split_rows(shape.vocab, size))}, 1);
    optimizer_ = std::make_unique<AdamW>(parameters_, TrainConfig{});
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      optimizer_->exp_avg()[i].fill_(-1);
      optimizer_->exp_avg_sq()[i].fill_(-1);
    }
  }

  std::vector<Parameter>& parameters() { return parameters_; }
  AdamW& optimizer() { return *optimizer_; }

  /// Gives every slice its part of whole_values(); main weights of a bf16 model are not their
  /// roundings, so that mixing them up shows.
  void fill() {
    optimizer_->set_num_steps(19);
    each_slice([](const at::Tensor& slice, const at::Tensor& expected) { slice.copy_(expected); });
  }

  /// The names of the slices that are not their part of whole_values().
  std::vector<std::string> wrong() {
    std::vector<std::string> names;
    each_slice([&](const at::Tensor& slice, const at::Tensor& expected) {
      if (!at::equal(slice, expected.to(slice.scalar_type()))) names.push_back(current_);
    });
    return names;
  }

  nlohmann::json config_json() const {
    return {{"architectures", {"LlamaForCausalLM"}},
            {"model_type", "llama"},
            {"vocab_size", shape_.vocab},
            {"hidden_size", shape_.hidden},
            {"intermediate_size", shape_.ffn},
            {"num_hidden_layers", shape_.layers},
            {"num_attention_heads", shape_.heads},
            {"num_key_value_heads", shape_.kv_heads},
            {"max_position_embeddings", 64},
            {"rms_norm_eps", 1e-5},
            {"rope_theta", 10000.0},
            {"hidden_act", "silu"},
            {"tie_word_embeddings", shape_.tied},
            {"bos_token_id", nullptr},
            {"eos_token_id", nullptr},
            {"torch_dtype", dtype_ == at::kBFloat16 ? "bfloat16" : "float32"}};
  }

 private:
  static Part whole(std::string name, std::vector<std::int64_t> shape) {
    return {std::move(name), std::move(shape), -1, 0, 0};
  }
  static Part even(std::string name, std::vector<std::int64_t> shape, int dim, std::int64_t rank,
                   std::int64_t size) {
    const std::int64_t length = shape[static_cast<std::size_t>(dim)] / size;
    return {std::move(name), std::move(shape), dim, rank * length, length};
  }
  Part rows(std::string name, std::vector<std::int64_t> shape,
            const std::vector<std::int64_t>& lengths) const {
    return {std::move(name), std::move(shape), 0, first_row(lengths, rank_),
            lengths[static_cast<std::size_t>(rank_)]};
  }

  void add(std::vector<Part> parts, std::int64_t num_padding_rows = 0) {
    std::vector<std::int64_t> shape = parts[0].shape;
    if (parts[0].dim >= 0) shape[static_cast<std::size_t>(parts[0].dim)] = parts[0].length;
    shape[0] = num_padding_rows;
    for (const Part& part : parts) shape[0] += part.dim == 0 ? part.length : part.shape[0];
    Parameter& parameter = parameters_.emplace_back();
    parameter.name = parts[0].name;
    parameter.value = at::full(shape, -1, dtype_).requires_grad_();
    parameter.main = dtype_ == at::kFloat ? parameter.value : at::full(shape, -1, at::kFloat);
    parameter.parts = std::move(parts);
  }

  template <class F>
  void each_slice(F&& fn) {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      Parameter& parameter = parameters_[i];
      std::int64_t row = 0;
      for (const Part& part : parameter.parts) {
        const std::int64_t num_rows = part.dim == 0 ? part.length : part.shape[0];
        const auto visit = [&](const at::Tensor& tensor, int kind) {
          current_ = part.name + " " + std::to_string(kind);
          const at::Tensor expected = whole_values(part.name, part.shape, kind);
          fn(tensor.narrow(0, row, num_rows),
             part.dim < 0 ? expected : expected.narrow(part.dim, part.begin, part.length));
        };
        visit(parameter.value, 0);
        visit(optimizer_->exp_avg()[i], 1);
        visit(optimizer_->exp_avg_sq()[i], 2);
        if (dtype_ != at::kFloat) visit(parameter.main, 3);
        row += num_rows;
      }
    }
  }

  int rank_, size_;
  at::ScalarType dtype_;
  ToyShape shape_;
  std::vector<Parameter> parameters_;
  std::unique_ptr<AdamW> optimizer_;
  std::string current_;
};

inline TrainerState toy_state(std::int64_t iteration) {
  TrainerState state;
  state.iteration = iteration;
  state.consumed_samples = 8 * iteration;
  state.seed = 77;
  state.config = {{"hidden_size", 16}};
  state.tuner = {{"matmul_reduce_scatter m=32 n=16", "chunked 4"}};
  return state;
}

/// Saves on `tp` alone.
inline void save_toy(const std::string& dir, const Group& tp, ToyModel& model,
                     std::int64_t iteration) {
  const auto dp = Group::create(c10::make_intrusive<c10d::HashStore>(), "dp", 0, 1);
  save_checkpoint(dir, tp, *dp, model.parameters(), model.optimizer(), toy_state(iteration),
                  model.config_json());
}

}  // namespace braid::test
