// RMSNorm, rotary attention and SwiGLU against plain torch, values and gradients.
#include "braid/layers/attention.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <string>

#include "tests/layers/support.h"

namespace braid::test {
namespace {

at::Tensor leaf(const at::Tensor& x) { return x.detach().clone().set_requires_grad(true); }

double tolerance_of(at::ScalarType dtype) { return dtype == at::kFloat ? 2e-6 : 1e-2; }

TEST(RmsNorm, EqualsPlainTorch) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const double tolerance = tolerance_of(dtype);
    for (const bool with_delta : {false, true}) {
      for (const std::int64_t h : {1, 37, 512}) {
        const std::int64_t t = 150;
        const auto x0 = rank_values(0, {t, h}, dtype), d0 = rank_values(1, {t, h}, dtype);
        const auto w0 = rank_values(2, {h}, dtype);
        const auto x = leaf(x0), d = leaf(d0), w = leaf(w0);
        const auto out = add_rms_norm(x, with_delta ? d : at::Tensor(), w, {1e-5, {}});
        const auto xe = leaf(x0.to(at::kDouble)), de = leaf(d0.to(at::kDouble)),
                   we = leaf(w0.to(at::kDouble));
        const auto sum = with_delta ? xe + de : xe;
        const auto norm = sum * at::rsqrt(sum.pow(2).mean(-1, true) + 1e-5) * we;
        expect_close(out.sum, sum, tolerance, "sum");
        expect_close(out.norm, norm, tolerance, "norm");
        const auto g = rank_values(
            3, {t, h}, dtype);  // the residual stream's gradient comes on top of the norm's
        ((out.norm * g).sum() + (out.sum * out.sum).sum()).backward();
        ((norm * g).sum() + (sum * sum).sum()).backward();
        expect_close(x.grad(), xe.grad(), tolerance, "dx");
        if (with_delta) expect_close(d.grad(), de.grad(), tolerance, "ddelta");
        expect_close(w.grad(), we.grad(), tolerance, "dw");
      }
    }
  }
}

TEST(RmsNorm, MainGradientAndUnusedOutputs) {
  const auto x = leaf(rank_values(0, {4, 8})), d = leaf(rank_values(1, {4, 8})),
             w = leaf(rank_values(2, {8}));
  const auto main_grad = at::ones({8});
  rms_norm(x, w, {1e-5, main_grad}).sum().backward();
  EXPECT_FALSE(w.grad().defined());
  const auto expected = x.detach() * at::rsqrt(x.detach().pow(2).mean(-1, true) + 1e-5);
  expect_close(main_grad, expected.sum(0) + 1, 1e-6, "main_grad");
  x.mutable_grad().reset();
  add_rms_norm(x, d, w, {}).sum.sum().backward();  // only the sum is used
  expect_close(x.grad(), at::ones({4, 8}), 0, "dx");
  expect_close(d.grad(), at::ones({4, 8}), 0, "ddelta");
}

/// transformers' rotate_half, on [b, H, s, d].
at::Tensor rotated(const at::Tensor& x, double base) {
  const auto s = x.size(2), d = x.size(3);
  const auto frequency =
      at::pow(at::scalar_tensor(base, at::kDouble), -at::arange(0, d, 2, at::kDouble) / d);
  const auto half_angle = at::outer(at::arange(s, at::kDouble), frequency);
  const auto angle = at::cat({half_angle, half_angle}, -1);
  const auto halves = x.chunk(2, -1);
  return x * angle.cos() + at::cat({-halves[1], halves[0]}, -1) * angle.sin();
}

TEST(RotaryCausalAttention, EqualsPlainTorch) {
  struct Sizes {
    std::int64_t s, b, h, g, d;
  };
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const auto z : {Sizes{1, 1, 1, 1, 2}, Sizes{33, 1, 4, 4, 8}, Sizes{33, 2, 4, 2, 8},
                         Sizes{70, 3, 6, 1, 16}, Sizes{300, 1, 6, 2, 32}}) {
      const auto qkv0 = rank_values(0, {z.s * z.b, (z.h + 2 * z.g) * z.d}, dtype) * 2;
      const auto qkv = leaf(qkv0);
      const auto out =
          rotary_causal_attention(qkv, rotary_table(z.s + 3, z.d, 500.0), {z.b, z.h, z.g, z.d});
      expect_close(qkv, qkv0, 0, "the input is left alone");

      const auto whole = leaf(qkv0.to(at::kDouble));
      const auto heads = whole.view({z.s, z.b, z.h + 2 * z.g, z.d}).permute({1, 2, 0, 3});
      const auto q = rotated(heads.narrow(1, 0, z.h), 500.0);
      const auto k = rotated(heads.narrow(1, z.h, z.g), 500.0).repeat_interleave(z.h / z.g, 1);
      const auto v = heads.narrow(1, z.h + z.g, z.g).repeat_interleave(z.h / z.g, 1);
      const auto hidden = at::ones({z.s, z.s}, at::kBool).triu(1);
      const auto scores = at::matmul(q, k.transpose(2, 3)) / std::sqrt(static_cast<double>(z.d));
      const auto expected = at::matmul(scores.masked_fill(hidden, -1e30).softmax(-1), v)
                                .permute({2, 0, 1, 3})
                                .reshape({z.s * z.b, z.h * z.d});
      const std::string what = "s " + std::to_string(z.s) + " b " + std::to_string(z.b);
      const double tolerance = dtype == at::kFloat ? 1e-5 : 2e-2;
      expect_close(out, expected, tolerance, what + " out");
      const auto g = rank_values(5, out.sizes(), dtype);
      (out * g).sum().backward();
      (expected * g).sum().backward();
      expect_close(qkv.grad(), whole.grad(), tolerance, what + " dqkv");
    }
  }
}

TEST(RotaryCausalAttention, CallersMistakes) {
  const auto table = rotary_table(4, 8, 10000.0);
  const auto qkv = rank_values(0, {4, 3 * 2 * 8});
  EXPECT_THROW(rotary_causal_attention(qkv, table, {1, 2, 1, 8}), c10::ValueError);
  EXPECT_THROW(rotary_causal_attention(qkv, table, {3, 2, 2, 8}), c10::ValueError);
  EXPECT_THROW(rotary_causal_attention(qkv, rotary_table(3, 8, 10000.0), {1, 2, 2, 8}),
               c10::ValueError);
  EXPECT_THROW(rotary_table(4, 7, 10000.0), c10::ValueError);
}

TEST(SwiGlu, EqualsPlainTorch) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const std::int64_t f : {1, 19, 300}) {
      const auto x0 =
          rank_values(0, {130, 2 * f}, dtype) * 30;  // far out, where the sigmoid is 0 or 1
      const auto x = leaf(x0), e = leaf(x0.to(at::kDouble));
      const auto halves = e.chunk(2, -1);
      const auto expected = at::silu(halves[0]) * halves[1];
      const auto y = swiglu(x);
      expect_close(y, expected, tolerance_of(dtype), "y");
      const auto g = rank_values(1, y.sizes(), dtype);
      (y * g).sum().backward();
      (expected * g).sum().backward();
      expect_close(x.grad(), e.grad(), tolerance_of(dtype), "dgate_up");
    }
  }
}

}  // namespace
}  // namespace braid::test
