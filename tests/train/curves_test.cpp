// Twenty steps of training give the same loss curve however the work is split and overlapped.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/train/small_run.h"

namespace braid {
namespace {

using test::small_model;

struct Curve {
  std::vector<double> losses;  // the last one is the validation's
  std::vector<double> grad_norms;
};

/// What every rank saw.
Curve curve_of(const TrainConfig& config, int ranks, GroupOptions options = {}) {
  std::vector<Curve> curves(static_cast<std::size_t>(ranks));
  test::run_trainers(
      config, ranks,
      [&](Trainer& trainer, const DataSplit& data, int rank) {
        Curve& curve = curves[static_cast<std::size_t>(rank)];
        for (int i = 0; i < config.train_iters; ++i) {
          const auto step = trainer.step(i);
          curve.losses.push_back(step.loss);
          curve.grad_norms.push_back(step.grad_norm);
        }
        curve.losses.push_back(trainer.validation_loss(*data.validation, 2));
      },
      options);
  for (const Curve& curve : curves) {
    EXPECT_EQ(curve.losses, curves[0].losses);
    EXPECT_EQ(curve.grad_norms, curves[0].grad_norms);
  }
  return curves[0];
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  EXPECT_EQ(a.size(), b.size());
  double largest = 0;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const double difference = std::abs(a[i] - b[i]) / std::abs(b[i]);
    if (!(difference <= largest)) largest = difference;  // NaN, too
  }
  return largest;
}

/// Compares with `plain` and notes the difference in the test's record.
void expect_same_curve(const Curve& curve, const Curve& plain, double tolerance) {
  const double losses = largest_difference(curve.losses, plain.losses);
  const double norms = largest_difference(curve.grad_norms, plain.grad_norms);
  EXPECT_LT(losses, tolerance);
  EXPECT_LT(norms, 10 * tolerance);
  std::printf("  loss differs by %.1e, gradient norm by %.1e\n", losses, norms);
}

/// One rank, nothing cut: what everything else is compared with.
const Curve& plain() {
  static const Curve curve = curve_of(small_model(), 1);
  return curve;
}

struct Overlap {
  const char* name;
  bool use_coc;
  const char* mode;
  int chunks;
};
constexpr Overlap kOverlaps[] = {
    {"off", false, "auto", 0},      {"chunked 2", true, "auto", 2}, {"chunked 4", true, "auto", 4},
    {"chunked 8", true, "auto", 8}, {"fused", true, "fused", 0},    {"auto", true, "auto", 0},
};

TrainConfig with(const Overlap& overlap, TrainConfig config, int tp, bool sequence_parallel) {
  config.tensor_model_parallel_size = tp;
  config.sequence_parallel = sequence_parallel;
  config.use_coc = overlap.use_coc;
  config.coc_mode = overlap.mode;
  config.coc_parallel_num = overlap.chunks;
  return config;
}

TEST(Curves, TheModelLearns) {
  EXPECT_GT(plain().losses.front(), 5);
  EXPECT_LT(plain().losses.back(), 0.6 * plain().losses.front());
}

// f32: tensor-parallel degree, sequence parallelism, overlap.
class Split : public testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(Split, GivesThePlainCurve) {
  const auto [tp, sequence_parallel] = GetParam();
  for (const Overlap& overlap : kOverlaps) {
    SCOPED_TRACE(overlap.name);
    std::printf("TP %d, SP %s, CoC %s:", tp, sequence_parallel ? "on" : "off", overlap.name);
    expect_same_curve(curve_of(with(overlap, small_model(), tp, sequence_parallel), tp), plain(),
                      1e-4);
  }
}

INSTANTIATE_TEST_SUITE_P(Curves, Split, testing::Combine(testing::Values(2, 4), testing::Bool()));

TEST(Curves, DataParallelRanksGiveThePlainCurve) {
  for (const bool sequence_parallel : {false, true}) {
    for (const Overlap& overlap : {kOverlaps[0], kOverlaps[4]}) {
      SCOPED_TRACE(overlap.name);
      std::printf("DP 2 x TP 2, SP %s, CoC %s:", sequence_parallel ? "on" : "off", overlap.name);
      expect_same_curve(curve_of(with(overlap, small_model(), 2, sequence_parallel), 4), plain(),
                        1e-4);
    }
  }
  std::printf("DP 4:");
  expect_same_curve(curve_of(small_model(), 4), plain(), 1e-4);
}

// Without shared memory: what ranks of several hosts do.
TEST(Curves, RanksThatShareNoMemoryGiveThePlainCurve) {
  GroupOptions network;
  network.shared_memory = false;
  for (const bool sequence_parallel : {false, true}) {
    std::printf("network, TP 2, SP %s, CoC chunked 4:", sequence_parallel ? "on" : "off");
    expect_same_curve(curve_of(with(kOverlaps[2], small_model(), 2, sequence_parallel), 2, network),
                      plain(), 1e-4);
  }
  std::printf("network, DP 2 x TP 2:");
  expect_same_curve(curve_of(with(kOverlaps[2], small_model(), 2, true), 4, network), plain(),
                    1e-4);
}

TEST(Curves, UntiedOutputLayerToo) {
  TrainConfig config = small_model();
  config.untie_embeddings_and_output_weights = true;
  const Curve untied = curve_of(config, 1);
  EXPECT_GT(largest_difference(untied.losses, plain().losses), 1e-2);
  for (const bool sequence_parallel : {false, true})
    expect_same_curve(curve_of(with(kOverlaps[4], config, 2, sequence_parallel), 2), untied, 1e-4);
}

// Recomputation computes the same numbers again: the same bits.
TEST(Curves, RecomputationChangesNoBit) {
  for (const auto& [method, layers] :
       {std::pair("uniform", 1), std::pair("uniform", 2), std::pair("block", 2)}) {
    SCOPED_TRACE(method);
    TrainConfig config = small_model();
    config.recompute_granularity = "full";
    config.recompute_method = method;
    config.recompute_num_layers = layers;
    const Curve one = curve_of(config, 1);
    EXPECT_EQ(one.losses, plain().losses);
    EXPECT_EQ(one.grad_norms, plain().grad_norms);
    for (const bool sequence_parallel : {false, true}) {
      const TrainConfig two = with(kOverlaps[4], config, 2, sequence_parallel);
      TrainConfig kept = two;
      kept.recompute_granularity = "";
      kept.recompute_method = "";
      kept.recompute_num_layers = 0;
      EXPECT_EQ(curve_of(two, 2).losses, curve_of(kept, 2).losses);
    }
  }
}

TEST(Curves, Bf16StaysWithinTwoPercent) {
  TrainConfig config = small_model();
  config.bf16 = true;
  const Curve whole = curve_of(config, 1);
  std::printf("bf16 against f32:");
  expect_same_curve(whole, plain(), 0.02);
  EXPECT_GT(largest_difference(whole.losses, plain().losses), 1e-5);  // it is not f32
  for (const int tp : {2, 4}) {
    for (const bool sequence_parallel : {false, true}) {
      for (const Overlap& overlap : kOverlaps) {
        const bool often = overlap.chunks == 2 || overlap.chunks == 8;
        if (tp == 4 ? overlap.chunks > 0 || !sequence_parallel : often) continue;
        SCOPED_TRACE(overlap.name);
        std::printf("bf16, TP %d, SP %s, CoC %s:", tp, sequence_parallel ? "on" : "off",
                    overlap.name);
        expect_same_curve(curve_of(with(overlap, config, tp, sequence_parallel), tp), whole, 0.02);
      }
    }
  }
}

}  // namespace
}  // namespace braid
