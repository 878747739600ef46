// Weights in int8, a quarter of f32's bytes: quantization, slices for tensor parallelism, and products with
// activations that stay in f32, bf16 or fp16.
//
// NOTE [int8 weight]. w[i, j] = (value[i, j] - zero_point) * scale, where scale and zero point are those of the whole
// tensor, of the channel i (a row: an output feature), or of row i's group of input features.
// Groups are counted from the whole weight's first column, so a shard's border may cut one:
// column j of a shard is in its group (first_column + j) / group_size - first_column / group_size.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

#include "braid/ops/int8_kernel.h"

namespace braid {

class Int8Weight {
 public:
  /// Keeps a packed copy of the values (NOTE [packed]).
  ///   Shapes  values int8 [n, k]   scales f32 [] or [1] (tensor), [n] or [n, 1] (channels); with a
  ///           group_size [n, groups of these columns]   zero_points int8 or f32 (integers), as
  ///           scales; undefined: all 0
  ///   Errors  ValueError: shapes or dtypes that don't fit, scales that aren't finite, zero points
  ///           that aren't integers
  explicit Int8Weight(const at::Tensor& values, const at::Tensor& scales,
                      const at::Tensor& zero_points = {}, std::int64_t group_size = 0,
                      std::int64_t first_column = 0);

  std::int64_t n() const { return n_; }
  std::int64_t k() const { return k_; }
  /// Of values, scales and zero points as they are kept.
  std::int64_t bytes() const;

  /// Output features begin to begin + length.
  [[nodiscard]] Int8Weight rows(std::int64_t begin, std::int64_t length) const;
  /// Input features begin to begin + length; cuts groups where it must.
  [[nodiscard]] Int8Weight columns(std::int64_t begin, std::int64_t length) const;
  /// [n, k] in `dtype`: exact in f64, rounded from f32 in half types.
  [[nodiscard]] at::Tensor dequantize(at::ScalarType dtype) const;

  /// out (+)= x @ w^T.
  ///   Shapes      x [m, k] f32, bf16 or fp16, any strides   out [m, n] in x's dtype or f32, any
  ///               stride of rows; apart from x
  ///   accumulate  adds to out, which is then f32
  ///   Sums        in f32, rounded once into out. Values are multiplied as integers, and each sum
  ///               over up to 512 columns that share scales is scaled once. The bits of a row depend
  ///               on k, the groups, x's dtype and the CPU's instructions, not on m or threads.
  ///               x * value must not leave the range of f32; subnormal bf16 x may count as 0
  ///   kernel      one of int8::kernels(); by default the best
  ///   Threads     ATen's, over output features; safe to call from several threads
  ///   Errors      ValueError: shapes or dtypes that don't fit
  void multiply(const at::Tensor& x, at::Tensor out, bool accumulate,
                const int8::Kernel& kernel = int8::kernels().back()) const;

 private:
  at::Tensor unpacked_values() const;  // [n, k]
  void multiply_tile(const at::Tensor& x, at::Tensor out, bool accumulate,
                     const int8::Kernel& kernel) const;

  std::int64_t n_, k_, group_size_, first_column_;
  at::Tensor values_;       // NOTE [packed]
  at::Tensor scales_;       // f32 [groups, n rounded up to panels]
  at::Tensor zero_points_;  // as scales_, or undefined
  std::vector<int8::Segment> segments_;
};

enum class Granularity : std::uint8_t { tensor, channel, group };

struct QuantizeOptions {
  Granularity granularity = Granularity::channel;
  std::int64_t group_size = 128;  // of granularity group: input features that share a scale
  bool symmetric = true;          // zero points are 0, values -127 to 127; otherwise -128 to 127
};

/// The nearest int8 values to a weight, with scales from its largest values.
///   Shapes  weight [n, k] f32, bf16 or fp16
///   Gives   |w - dequantized| <= scale / 2 but for f32's rounding; scales are never 0
///   Errors  ValueError: a weight that isn't finite, group_size < 1
[[nodiscard]] Int8Weight quantize_weight(const at::Tensor& weight, QuantizeOptions options = {});

}  // namespace braid
