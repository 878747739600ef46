// The rest of a decoder layer, on whole heads and whole rows: RMSNorm with its residual addition,
// rotary positions and causal attention in one, SwiGLU. All differentiable, f32 or bf16, f32 inside.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <utility>

namespace braid {

struct NormOptions {
  double epsilon = 1e-5;
  at::Tensor main_grad;  // f32 [h]: takes the weight's gradient by addition, and none is returned
};

struct ResidualNorm {
  at::Tensor sum;   // x + delta (x itself without delta): the residual stream
  at::Tensor norm;  // sum / sqrt(mean(sum^2) + epsilon) * weight
};

/// Adds a block's output to the residual stream and normalises the sum,
/// in one pass over the rows; backward too.
///   Shapes  x, delta, sum, norm [t, h]   weight [h]; delta may be undefined
///   Saved   sum, the inverse root mean squares [t], weight
///   Errors  ValueError: shapes or dtypes differ, or are neither f32 nor bf16
ResidualNorm add_rms_norm(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight,
                          const NormOptions& options);
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, const NormOptions& options);

/// Cosines and sines of rotary positions, as transformers' default Llama.
struct RotaryTable {
  at::Tensor cosine, sine;  // [s, d/2] f32
};
RotaryTable rotary_table(std::int64_t s, std::int64_t d, double base);

struct AttentionShape {
  std::int64_t batch = 1;
  std::int64_t num_heads = 1;         // of this rank
  std::int64_t num_query_groups = 1;  // of this rank: key and value heads; divides num_heads
  std::int64_t head_dim = 1;          // even
};

/// The type attention computes in: without matrix units ATen's bf16 attention takes five times as long as f32.
at::ScalarType attention_type(at::ScalarType dtype);

/// Rotates query and key (rotate-half, as transformers) and attends causally, scale 1/sqrt(d); each
/// key and value head serves num_heads / num_query_groups query heads. No mask is built.
///   Shapes  qkv [s * b, (H + 2 G) * d]: query, key, value heads side by side; token p * b + i is
///           position p of sequence i   returns [s * b, H * d]
///   Saved   the rotated heads (not qkv), the output, the log-sum-exps [b, H, s]
///   Errors  ValueError: shapes that don't fit, an odd d, fewer positions in the table than in qkv
at::Tensor rotary_causal_attention(const at::Tensor& qkv, const RotaryTable& table,
                                   const AttentionShape& shape);

/// silu(gate) * up.
///   Shapes  gate_up [t, 2 f], gate first; returns [t, f]
///   Saved   gate_up
at::Tensor swiglu(const at::Tensor& gate_up);

}  // namespace braid
