// The products behind every collective matmul, a row tile at a time: ATen's matmuls, half types
// through f32.
//
// NOTE [half]. Half tiles are converted to f32, multiplied there and rounded at most once: sums
// over ranks stay in f32, and on CPUs without AMX this is faster than the half matmul (0.57 to 0.65
// of its time in bf16; measured, see docs/design.md).
#pragma once

#include <ATen/ATen.h>

namespace braid {

/// y (+)= x @ weight^T for many row tiles of one x. Keeps `weight` (an f32 copy of a half one).
class TileMatmul {
 public:
  /// weight [n, k], any strides.
  explicit TileMatmul(const at::Tensor& weight);

  /// out (+)= x @ weight^T.
  ///   Shapes      x [rows, k], any strides   out [rows, n] in x's dtype, or f32 for half x
  ///   accumulate  adds to out, which is then f32 or f64
  void multiply(const at::Tensor& x, at::Tensor out, bool accumulate) const;

 private:
  at::Tensor weight_t_;  // [k, n], in the dtype of sums
};

/// dw (+)= dy^T @ x for some rows.
///   Shapes  dy [rows, n]   x [rows, k]   dw [n, k] in f32 (f64 for f64): the sum over rows is
///           never rounded to half
void add_weight_grad(const at::Tensor& dy, const at::Tensor& x, at::Tensor dw, bool accumulate);

}  // namespace braid
