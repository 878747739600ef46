// A trainable tensor as this rank holds it, and how it maps to the whole tensors of a transformers checkpoint.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <vector>

namespace braid {

/// Some rows of a Parameter's value: this rank's slice of one whole tensor, whole.narrow(dim, begin, length).
struct Part {
  std::string name;  // as in transformers, e.g. "model.layers.0.self_attn.q_proj.weight"
  std::vector<std::int64_t> shape;  // of the whole tensor
  int dim = -1;  // the dim that is split over tp; -1: every tp rank holds the whole
  std::int64_t begin = 0, length = 0;  // along dim; unused when dim is -1
};

/// Fused weights (query, key, value in one matmul) have several parts, concatenated along dim 0 of
/// value in order.
struct Parameter {
  std::string name;      // unique in the model
  at::Tensor value;      // compute dtype, a leaf that requires grad
  at::Tensor main;       // f32 main weight; the same tensor as value when that is f32
  at::Tensor main_grad;  // f32, where gradients are accumulated
  std::vector<Part> parts;
  bool sharded = false;  // over tp: its squares count on every tp rank; else once
  // Its gradient still has to be summed over tp (replicated, used on row shards).
  bool grad_partial_over_tp = false;
  bool weight_decay = true;  // false for norms and biases
};

}  // namespace braid
