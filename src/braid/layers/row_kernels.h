// Loops over rows for what ATen has no fused CPU kernel: norm, rotation, SwiGLU, softmax. Plain
// tensors, no autograd.
//
// Values are f32 or bf16 (f32 inside, rounded once); every tensor is contiguous unless a comment
// says otherwise. All rows are independent: the work is cut over ATen's threads.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace braid::row_kernels {

/// sum = x + delta (where delta is defined), y = sum / rms(sum) * weight.
///   Shapes  x, delta, sum, y [t, h]   weight [h]   inverse_rms [t] f32; sum is not written without
///           delta
void add_rms_norm(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight,
                  double epsilon, at::Tensor& sum, at::Tensor& y, at::Tensor& inverse_rms);

/// dx = dsum (where defined) + gradient of y with respect to x;  dweight += gradient of the weight
/// (where defined).
///   Shapes  dy, dsum, x, dx [t, h]   weight [h]   inverse_rms [t] f32   dweight [h] f32
void rms_norm_backward(const at::Tensor& dy, const at::Tensor& dsum, const at::Tensor& x,
                       const at::Tensor& weight, const at::Tensor& inverse_rms, at::Tensor& dx,
                       const at::Tensor& dweight);

/// Copies heads between token-major rows and head-major blocks, the first num_rotated of them
/// rotated on the way (rotate-half: feature i with feature i + d/2), by the angle of the token's position.
///   Shapes  rows [s * b, H * d], token p * b + i is position p of sequence i   heads [b, H, s, d]
///           cosine, sine [>= s, d/2] f32; rows and heads may differ in type
void rotate_to_heads(const at::Tensor& rows, const at::Tensor& cosine, const at::Tensor& sine,
                     std::int64_t num_rotated, at::Tensor& heads);
/// The adjoint, for heads in parts (query, key, value): writes rows[:, begin * d : (begin + H) *
/// d], rotated back if `rotated`.
///   Shapes  heads [b, H, s, d] of any strides, the last 1
void rotate_from_heads(const at::Tensor& heads, const at::Tensor& cosine, const at::Tensor& sine,
                       bool rotated, std::int64_t begin, at::Tensor& rows);

/// y = silu(gate) * up.
///   Shapes  gate_up [t, 2 f], gate first   y [t, f]
void swiglu(const at::Tensor& gate_up, at::Tensor& y);
///   Shapes  dy [t, f]   gate_up, dgate_up [t, 2 f]
void swiglu_backward(const at::Tensor& dy, const at::Tensor& gate_up, at::Tensor& dgate_up);

/// Of each row: the maximum, the sum of exp(value - maximum), and the value at its label (0 if the
/// label is not among begin .. begin + v - 1).
///   Shapes  logits [t, v]   labels [t] int64   maximum, sum, target [t] f32
void softmax_statistics(const at::Tensor& logits, const at::Tensor& labels, std::int64_t begin,
                        at::Tensor& maximum, at::Tensor& sum, at::Tensor& target);
/// In place: logits = scale * (exp(logits - log_sum) - [column is the row's label]).
///   Shapes  log_sum [t] f32
void softmax_backward(at::Tensor& logits, const at::Tensor& labels, std::int64_t begin,
                      const at::Tensor& log_sum, float scale);

/// y[i] = table[tokens[i] - begin] where that row exists, else 0.
///   Shapes  table [v, h]   tokens [t] int64   y [t, h]
void gather_rows(const at::Tensor& table, const at::Tensor& tokens, std::int64_t begin,
                 at::Tensor& y);
/// table[tokens[i] - begin] += dy[i] where that row exists; table f32 (dy of any kind) or dy's dtype.
void scatter_add_rows(const at::Tensor& dy, const at::Tensor& tokens, std::int64_t begin,
                      at::Tensor& table);

}  // namespace braid::row_kernels
