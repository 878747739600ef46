// Corners of the row loops that the layers' tests don't reach: extreme values, threads, the same bits again.
#include "braid/layers/row_kernels.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <limits>

#include "tests/layers/support.h"

namespace braid::test {
namespace {

TEST(RowKernels, ExponentialOverItsWholeRange) {
  // One column each: sum of exp(x - x) is 1; with a second column of 0 the sum shows exp(x).
  const auto x = at::linspace(-100, 0, 4001);
  const auto logits = at::stack({x, at::zeros_like(x)}, 1);
  auto maximum = at::empty({4001}), sum = at::empty({4001}), target = at::empty({4001});
  row_kernels::softmax_statistics(logits, at::zeros({4001}, at::kLong), 0, maximum, sum, target);
  EXPECT_TRUE(at::equal(target, x));
  EXPECT_TRUE(at::equal(maximum, at::zeros_like(x)));
  expect_close(sum, 1 + x.to(at::kDouble).exp(), 1e-7, "1 + exp(x)");
  auto gradient = at::stack({x, x}, 1).contiguous();
  row_kernels::softmax_backward(gradient, at::full({4001}, 7, at::kLong), 0, at::zeros({4001}),
                                1.0F);
  const auto relative = (gradient.select(1, 0).to(at::kDouble) / x.to(at::kDouble).exp() - 1).abs();
  EXPECT_LE(relative.slice(0, 600).max().item<double>(), 3e-7);  // from -85 up
}

TEST(RowKernels, InfinityAndNanShow) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto gate_up = at::tensor({nan, 1.0F, 2.0F, 3.0F}).view({1, 4});
  auto y = at::empty({1, 2});
  row_kernels::swiglu(gate_up, y);
  EXPECT_TRUE(at::isnan(y[0][0]).item<bool>());
  EXPECT_FALSE(at::isnan(y[0][1]).item<bool>());
  auto half = at::empty({1, 2}, at::kBFloat16);
  row_kernels::swiglu(gate_up.to(at::kBFloat16), half);
  EXPECT_TRUE(at::isnan(half[0][0]).item<bool>());
}

TEST(RowKernels, ThreadsGiveTheSameBitsInEveryRun) {
  const int before = at::get_num_threads();
  at::set_num_threads(2);
  const std::int64_t t = 2000, h = 64;
  const auto x = rank_values(0, {t, h}), dy = rank_values(1, {t, h}), w = rank_values(2, {h});
  auto y = at::empty({t, h}), inverse = at::empty({t}), sum = x, dx = at::empty({t, h});
  row_kernels::add_rms_norm(x, {}, w, 1e-5, sum, y, inverse);
  const auto run = [&] {
    auto dweight = at::zeros({h});
    row_kernels::rms_norm_backward(dy, {}, x, w, inverse, dx, dweight);
    return dweight;
  };
  const auto first = run();
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(at::equal(first, run()));
  expect_close(first, (dy * x * inverse.unsqueeze(1)).sum(0), 1e-5, "dweight");
  at::set_num_threads(before);
}

TEST(RowKernels, OtherTypesAreRefused) {
  auto y = at::empty({1, 1}, at::kDouble);
  EXPECT_THROW(row_kernels::swiglu(at::ones({1, 2}, at::kDouble), y), c10::ValueError);
}

}  // namespace
}  // namespace braid::test
