// The products behind every collective matmul, a row tile at a time: ATen's matmuls, half types through f32.
//
// NOTE [half]. Half tiles are converted to f32 and multiplied there, unless the CPU has
// instructions for products of that type: then ATen's half matmul is faster (docs/design.md has both
// measured). Sums over ranks and over tiles are in f32 either way; a native product is rounded
// once before it is added.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <variant>

#include "braid/ops/int8_weight.h"

namespace braid {

/// Whether `rows` rows of a half type are multiplied faster in ATen's own matmul than through f32, as
/// far as a rule can tell: by this CPU's instructions, and where converting the weight costs more.
bool is_native(at::ScalarType dtype, std::int64_t rows);

/// Whether there are two ways to multiply x: a half type.
inline bool has_native_form(const at::Tensor& x) {
  return at::isReducedFloatingType(x.scalar_type());
}

using AnyWeight = std::variant<at::Tensor, Int8Weight>;

/// y (+)= x @ weight^T for many row tiles of one x. Keeps `weight` (an f32 copy of a half one that
/// is not multiplied natively).
class TileMatmul {
 public:
  /// weight [n, k], any strides.
  TileMatmul(const AnyWeight& weight, bool native);

  /// out (+)= x @ weight^T + bias.
  ///   Shapes      x [rows, k], any strides   out [rows, n] in x's dtype, or f32 for half x
  ///               bias [n] in x's dtype, added before the result is rounded; may be undefined
  ///   accumulate  adds to out, which is then f32 or f64; without a bias
  void multiply(const at::Tensor& x, at::Tensor out, bool accumulate,
                const at::Tensor& bias = {}) const;

 private:
  void multiply_plain(const at::Tensor& x, at::Tensor out, bool accumulate) const;

  at::Tensor weight_t_;  // [k, n], in the dtype that is multiplied; undefined if int8_
  std::optional<Int8Weight> int8_;
};

/// x @ weight^T + bias without communication, natively where is_native() says so.
///   Shapes  x [rows, k]   bias [n] or undefined   returns [rows, n] in x's dtype
at::Tensor multiply_whole(const at::Tensor& x, const AnyWeight& weight, const at::Tensor& bias);

/// dw (+)= dy^T @ x for some rows.
///   Shapes  dy [rows, n]   x [rows, k]   dw [n, k] in f32 (f64 for f64): the sum over rows is
///           never rounded to half, so half types always go through f32
void add_weight_grad(const at::Tensor& dy, const at::Tensor& x, at::Tensor dw, bool accumulate);

/// dw (+)= what `add(sum, accumulate)` adds to a sum, in the dtype of sums; rounded once.
template <class F>
void through_sum_dtype(at::Tensor dw, bool accumulate, F&& add) {
  const bool is_half = at::isReducedFloatingType(dw.scalar_type());
  if (!is_half) return add(dw, accumulate);
  const at::Tensor sum = accumulate ? dw.to(at::kFloat) : at::empty(dw.sizes(), at::kFloat);
  add(sum, accumulate);
  dw.copy_(sum);
}

}  // namespace braid
