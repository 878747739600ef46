// Sampling: what may be drawn, how often, and what it depends on.
#include "braid/generate/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>

namespace braid {
namespace {

constexpr int kDraws = 20000;

/// The share of each token among many draws from these logits.
std::map<std::int64_t, double> shares(const std::vector<float>& logits, double temperature,
                                      double top_p) {
  Sampler sampler({temperature, top_p, 5}, 1);
  const at::Tensor row = at::tensor(logits).unsqueeze(0);
  std::map<std::int64_t, double> counts;
  for (int i = 0; i < kDraws; ++i) ++counts[sampler.choose(row).item<std::int64_t>()];
  for (auto& [token, count] : counts) count /= kDraws;
  return counts;
}

/// The tokens are exactly those expected, each as often as expected within five standard deviations.
void expect_shares(const std::map<std::int64_t, double>& drawn,
                   const std::map<std::int64_t, double>& expected) {
  for (const auto& [token, share] : drawn) EXPECT_TRUE(expected.contains(token)) << token;
  for (const auto& [token, share] : expected) {
    const double deviation = std::sqrt(share * (1 - share) / kDraws);
    ASSERT_TRUE(drawn.contains(token)) << token;
    EXPECT_NEAR(drawn.at(token), share, 5 * deviation) << token;
  }
}

std::vector<float> logits_of(const std::vector<double>& probabilities) {
  std::vector<float> logits;
  for (const double p : probabilities) logits.push_back(static_cast<float>(std::log(p)) + 3);
  return logits;
}

TEST(Sampler, DrawsWithTheModelsProbabilities) {
  expect_shares(shares(logits_of({0.1, 0.4, 0.2, 0.3}), 1, 1),
                {{0, 0.1}, {1, 0.4}, {2, 0.2}, {3, 0.3}});
}

TEST(Sampler, TemperatureIsThePowerOfTheProbabilities) {
  const auto logits = logits_of({0.1, 0.4, 0.2, 0.3});
  expect_shares(shares(logits, 0.5, 1),
                {{0, 0.01 / 0.3}, {1, 0.16 / 0.3}, {2, 0.04 / 0.3}, {3, 0.09 / 0.3}});
  const double sum = std::sqrt(0.1) + std::sqrt(0.4) + std::sqrt(0.2) + std::sqrt(0.3);
  expect_shares(shares(logits, 2, 1), {{0, std::sqrt(0.1) / sum},
                                       {1, std::sqrt(0.4) / sum},
                                       {2, std::sqrt(0.2) / sum},
                                       {3, std::sqrt(0.3) / sum}});
}

TEST(Sampler, TheNucleusIsTheFewestTokensThatReachTopP) {
  const auto logits = logits_of({0.1, 0.4, 0.2, 0.3});
  expect_shares(shares(logits, 1, 0.39), {{1, 1.0}});
  expect_shares(shares(logits, 1, 0.41), {{1, 4.0 / 7}, {3, 3.0 / 7}});
  expect_shares(shares(logits, 1, 0.69), {{1, 4.0 / 7}, {3, 3.0 / 7}});
  expect_shares(shares(logits, 1, 0.71), {{1, 4.0 / 9}, {3, 3.0 / 9}, {2, 2.0 / 9}});
  expect_shares(shares(logits, 1, 1e-9), {{1, 1.0}});
  expect_shares(shares(logits, 1, 0.999), {{0, 0.1}, {1, 0.4}, {2, 0.2}, {3, 0.3}});
  // The nucleus is that of the tempered probabilities, here 1/30, 16/30, 4/30, 9/30.
  expect_shares(shares(logits, 0.5, 0.52), {{1, 1.0}});
  expect_shares(shares(logits, 0.5, 0.84), {{1, 16.0 / 29}, {3, 9.0 / 29}, {2, 4.0 / 29}});
  // Of equal ones the lower ids.
  expect_shares(shares({1, 1, 1, 1}, 1, 0.49), {{0, 0.5}, {1, 0.5}});
}

TEST(Sampler, WithoutTemperatureItIsTheMostProbable) {
  Sampler sampler({}, 3);
  const at::Tensor logits =
      at::tensor({0.F, 2.F, 1.F, 5.F, 5.F, -1.F, -3.F, -2.F, -2.5F}).view({3, 3});
  EXPECT_TRUE(at::equal(sampler.choose(logits), at::tensor({1, 0, 1}, at::kLong)));
}

TEST(Sampler, ARowDependsOnTheSeedAndItsNumberAlone) {
  const at::Tensor logits = at::zeros({3, 50});
  const auto draws = [&](std::uint64_t seed, std::int64_t rows) {
    Sampler sampler({1, 0.9, seed}, rows);
    std::vector<at::Tensor> all;
    for (int i = 0; i < 20; ++i) all.push_back(sampler.choose(logits.narrow(0, 0, rows)));
    return at::stack(all, 1);
  };
  const at::Tensor three = draws(7, 3);
  EXPECT_TRUE(at::equal(three, draws(7, 3)));
  EXPECT_TRUE(at::equal(three.narrow(0, 0, 1), draws(7, 1)));
  EXPECT_FALSE(at::equal(three[0], three[1]));
  EXPECT_FALSE(at::equal(three, draws(8, 3)));
}

TEST(Sampler, RefusesWhatItCantDrawFrom) {
  EXPECT_THROW(Sampler({-0.5, 1, 1}, 1), c10::ValueError);
  EXPECT_THROW(Sampler({1, 0, 1}, 1), c10::ValueError);
  EXPECT_THROW(Sampler({1, 1.01, 1}, 1), c10::ValueError);
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(),
                  kInfinity = std::numeric_limits<float>::infinity();
  for (const double temperature : {0.0, 1.0}) {
    Sampler sampler({temperature, 1, 1}, 1);
    EXPECT_THROW(sampler.choose(at::tensor({1.F, kNan}).view({1, 2})), c10::Error);
    EXPECT_THROW(sampler.choose(at::tensor({1.F, kInfinity}).view({1, 2})), c10::Error);
    EXPECT_EQ(sampler.choose(at::tensor({1.F, -kInfinity}).view({1, 2})).item<std::int64_t>(), 0);
  }
}

}  // namespace
}  // namespace braid
