// AdamW, clipping and the learning rate against torch.optim.AdamW, on one rank.
#include "braid/train/optimizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tests/train/adamw_golden.h"

namespace braid {
namespace {

at::Tensor values(at::IntArrayRef shape, double phase, double scale) {
  const auto n = c10::multiply_integers(shape);
  return (at::sin(at::arange(n, at::kDouble) * 0.37 + phase) * scale).to(at::kFloat).reshape(shape);
}

// The settings of adamw_golden.py.
TrainConfig golden_config(const std::string& style) {
  TrainConfig c;
  c.lr = 0.03, c.min_lr = 0.004, c.lr_warmup_iters = 3, c.lr_decay_iters = 8,
  c.lr_decay_style = style;
  c.adam_beta1 = 0.8, c.adam_beta2 = 0.95, c.adam_eps = 1e-6, c.weight_decay = 0.1,
  c.clip_grad = 1.5;
  return c;
}

std::vector<Parameter> golden_parameters(at::ScalarType dtype) {
  std::vector<Parameter> parameters(2);
  const std::vector<std::vector<std::int64_t>> shapes = {{7, 5}, {6}};
  for (std::size_t i = 0; i < 2; ++i) {
    auto& p = parameters[i];
    p.main = values(shapes[i], 1.0 + static_cast<double>(i), 1);
    p.value = dtype == at::kFloat ? p.main : p.main.to(dtype);
    p.value.requires_grad_(true);
    p.weight_decay = i == 0;
  }
  return parameters;
}

void run_golden_steps(std::vector<Parameter>& parameters, std::int64_t begin, std::int64_t end,
                      AdamW& adamw) {
  const auto config = golden_config("cosine");
  const auto group = Group::create(c10::make_intrusive<c10d::HashStore>(), "alone", 0, 1);
  const auto grads = allocate_main_grads(parameters);
  for (auto step = begin; step < end; ++step) {
    for (std::size_t i = 0; i < 2; ++i) {
      parameters[i].main_grad.copy_(values(
          parameters[i].value.sizes(), 0.5 * static_cast<double>(step) + 2 * static_cast<double>(i),
          0.2 * static_cast<double>(step + 1)));
    }
    reduce_gradients(grads, *group, *group);
    const auto norm = grad_norm(parameters, *group);
    EXPECT_NEAR(norm, test::kGoldenNorms[step], 1e-6 * norm);
    clip_grads(grads, norm, config.clip_grad);
    adamw.step(learning_rate(config, step));
  }
}

TEST(AdamW, EqualsTorch) {
  auto parameters = golden_parameters(at::kFloat);
  AdamW adamw(parameters, golden_config("cosine"));
  run_golden_steps(parameters, 0, 10, adamw);
  const auto matrix = at::tensor(at::ArrayRef<float>(test::kGoldenMatrix)).reshape({7, 5});
  const auto bias = at::tensor(at::ArrayRef<float>(test::kGoldenBias));
  EXPECT_LT((parameters[0].value - matrix).abs().max().item<float>(), 1e-6);
  EXPECT_LT((parameters[1].value - bias).abs().max().item<float>(), 1e-6);
  EXPECT_EQ(adamw.num_steps(), 10);
}

TEST(AdamW, GoesOnBitForBitFromItsState) {
  auto whole = golden_parameters(at::kFloat);
  AdamW all(whole, golden_config("cosine"));
  run_golden_steps(whole, 0, 10, all);

  auto first = golden_parameters(at::kFloat);
  AdamW before(first, golden_config("cosine"));
  run_golden_steps(first, 0, 4, before);
  auto second = golden_parameters(at::kFloat);
  AdamW after(second, golden_config("cosine"));
  for (std::size_t i = 0; i < 2; ++i) {
    second[i].main.detach().copy_(first[i].main);
    after.exp_avg()[i].copy_(before.exp_avg()[i]);
    after.exp_avg_sq()[i].copy_(before.exp_avg_sq()[i]);
  }
  after.set_num_steps(before.num_steps());
  run_golden_steps(second, 4, 10, after);
  for (std::size_t i = 0; i < 2; ++i) EXPECT_TRUE(second[i].value.equal(whole[i].value));
}

TEST(AdamW, HalfWeightsFollowTheMainWeights) {
  auto plain = golden_parameters(at::kFloat), half = golden_parameters(at::kBFloat16);
  AdamW a(plain, golden_config("cosine")), b(half, golden_config("cosine"));
  run_golden_steps(plain, 0, 5, a);
  run_golden_steps(half, 0, 5, b);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(half[i].main.equal(plain[i].main.detach()));
    EXPECT_EQ(half[i].value.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(half[i].value.equal(half[i].main.to(at::kBFloat16)));
    EXPECT_TRUE(half[i].value.requires_grad());
  }
}

TEST(LearningRate, EqualsMegatrons) {
  for (std::int64_t i = 0; i < 10; ++i) {
    EXPECT_NEAR(learning_rate(golden_config("cosine"), i), test::kGoldenCosine[i], 1e-9) << i;
    EXPECT_NEAR(learning_rate(golden_config("linear"), i), test::kGoldenLinear[i], 1e-9) << i;
  }
  EXPECT_DOUBLE_EQ(learning_rate(golden_config("constant"), 1), 0.01);
  EXPECT_DOUBLE_EQ(learning_rate(golden_config("constant"), 100), 0.03);
  auto no_warmup = golden_config("linear");
  no_warmup.lr_warmup_iters = 0;
  EXPECT_DOUBLE_EQ(learning_rate(no_warmup, 0), 0.03);
  EXPECT_DOUBLE_EQ(learning_rate(no_warmup, 8), 0.004);
}

TEST(MainGrads, AreViewsOfOneTensorWithThePartialOnesTogether) {
  std::vector<Parameter> parameters(4);
  for (std::size_t i = 0; i < 4; ++i) {
    parameters[i].value = at::zeros({static_cast<std::int64_t>(i) + 1, 3});
    parameters[i].grad_partial_over_tp = i % 2 == 1;
  }
  const auto grads = allocate_main_grads(parameters);
  EXPECT_EQ(grads.flat.numel(), 30);
  EXPECT_EQ(grads.partial_over_tp.numel(), 18);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(parameters[i].main_grad.sizes(), parameters[i].value.sizes());
    parameters[i].main_grad.fill_(static_cast<double>(i) + 1);
  }
  EXPECT_EQ(grads.flat.sum().item<float>(), 3 * 1 + 6 * 2 + 9 * 3 + 12 * 4);
  EXPECT_EQ(grads.partial_over_tp.sum().item<float>(), 6 * 2 + 12 * 4);
  grads.flat.zero_();
  EXPECT_EQ(parameters[3].main_grad.abs().max().item<float>(), 0);
}

TEST(ClipGrads, LeavesSmallGradientsAndZeroMeansNoClipping) {
  std::vector<Parameter> parameters(1);
  parameters[0].value = at::zeros({4});
  const auto grads = allocate_main_grads(parameters);
  grads.flat.fill_(3);
  clip_grads(grads, 6, 0);
  clip_grads(grads, 6, 7);
  EXPECT_TRUE(grads.flat.equal(at::full({4}, 3.0f)));
  clip_grads(grads, 6, 2);
  EXPECT_NEAR(grads.flat[0].item<float>(), 1, 1e-6);
}

}  // namespace
}  // namespace braid
