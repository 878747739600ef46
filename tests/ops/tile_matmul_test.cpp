// Products of tiles, half types both through f32 and natively, against the product in f64.
#include "braid/ops/tile_matmul.h"

#include <gtest/gtest.h>

namespace braid {
namespace {

struct Operands {
  at::Tensor x, weight;
  at::Tensor product() const { return at::mm(x.to(at::kDouble), weight.to(at::kDouble).t()); }
};

Operands operands(std::int64_t rows, at::ScalarType dtype) {
  at::manual_seed(rows);
  return {at::randn({rows, 40}).to(dtype), at::randn({24, 40}).to(dtype)};
}

/// Within `roundings` of the largest value to `dtype`.
void expect_close(const at::Tensor& y, const at::Tensor& expected, double epsilon) {
  if (y.numel() == 0) return;
  const double error = (y.to(at::kDouble) - expected).abs().max().item<double>();
  EXPECT_LE(error, epsilon * (1 + expected.abs().max().item<double>()));
}

double epsilon_of(at::ScalarType dtype) { return dtype == at::kBFloat16 ? 4e-3 : 5e-4; }

TEST(TileMatmul, HalfTypesBothWays) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    for (const bool native : {false, true}) {
      for (const std::int64_t rows : {0, 1, 7, 700}) {
        const Operands o = operands(rows, dtype);
        const TileMatmul matmul(o.weight, native);
        at::Tensor half = at::full({rows, 24}, 99, o.x.options());
        matmul.multiply(o.x, half, false);
        expect_close(half, o.product(), epsilon_of(dtype));
        at::Tensor sum = at::full({rows, 24}, 99, at::kFloat);
        matmul.multiply(o.x, sum, false);
        expect_close(sum, o.product(), native ? epsilon_of(dtype) : 1e-6);
        matmul.multiply(o.x, sum, true);
        expect_close(sum, 2 * o.product(), native ? epsilon_of(dtype) : 1e-6);
      }
    }
  }
}

TEST(TileMatmul, WeightGradientsOfHalfTypesAreSummedInF32) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    for (const std::int64_t rows : {0, 1, 7, 700}) {
      const at::Tensor x = operands(rows, dtype).x, dy = x.narrow(1, 0, 24);
      const at::Tensor expected = at::mm(dy.t().to(at::kDouble), x.to(at::kDouble));
      at::Tensor dw = at::full({24, 40}, 99, at::kFloat);
      add_weight_grad(dy, x, dw, false);
      expect_close(dw, expected, 1e-6);
      add_weight_grad(dy, x, dw, true);
      expect_close(dw, 2 * expected, 1e-6);
    }
  }
}

}  // namespace
}  // namespace braid
