// The gradients' sums over ranks beside the backward pass: the same numbers as after it, and when they start.
#include <ATen/record_function.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "braid/core/log.h"
#include "braid/layers/parallel_linear.h"
#include "braid/train/gradients.h"
#include "tests/support/ranks.h"
#include "tests/train/small_run.h"

namespace braid {
namespace {

using test::rank_integers;
using test::run_ranks;
using test::small_model;

constexpr std::int64_t kEverything = std::int64_t{1} << 40;
constexpr std::int64_t kRows = 3;

GroupOptions over(bool shared_memory) { return {std::chrono::seconds(60), shared_memory}; }

std::shared_ptr<Group> alone() {
  return Group::create(c10::make_intrusive<c10d::HashStore>(), "alone", 0, 1);
}

/// Weights [i + 1, 4], so that buckets in another order would be refused.
std::vector<Parameter> make_parameters(std::size_t num) {
  std::vector<Parameter> parameters(num);
  for (std::size_t i = 0; i < num; ++i) {
    parameters[i].name = fmt::format("weight {}", i);
    parameters[i].value = at::ones({static_cast<std::int64_t>(i) + 1, 4}).requires_grad_();
  }
  return parameters;
}

at::Tensor input(int rank, std::size_t parameter, std::size_t use) {
  return rank_integers(rank + 2 * static_cast<int>(parameter) + static_cast<int>(use), {kRows, 4});
}

/// A sum of products, one for each entry of `uses`, a parameter; backward comes to the last one first.
at::Tensor loss_of(const std::vector<Parameter>& parameters, const std::vector<std::size_t>& uses,
                   int rank) {
  at::Tensor loss = at::zeros({});
  for (std::size_t use = 0; use < uses.size(); ++use) {
    const Parameter& p = parameters[uses[use]];
    LinearOptions options;
    options.main_grad = p.main_grad;
    const auto nth = static_cast<std::size_t>(
        std::count(uses.begin(), uses.begin() + static_cast<std::ptrdiff_t>(use), uses[use]));
    loss = loss + column_parallel_linear(input(rank, uses[use], nth), p.value, {}, options).sum();
  }
  return loss;
}

/// The mean over ranks of the gradient of loss_of.
at::Tensor expected(const Parameter& p, std::size_t i, int num_uses, int ranks) {
  at::Tensor sum = at::zeros(p.value.sizes());
  for (int rank = 0; rank < ranks && p.value.requires_grad(); ++rank)
    for (int use = 0; use < num_uses; ++use)
      sum += input(rank, i, static_cast<std::size_t>(use)).sum(0);
  return sum / ranks;
}

TEST(GradBuckets, HaveWholeParametersFromTheEndOn) {
  auto parameters = make_parameters(6);  // of 4, 8, 12, 16, 20, 24 elements
  parameters[1].grad_partial_over_tp = parameters[4].grad_partial_over_tp = true;
  const MainGrads grads = allocate_main_grads(parameters);
  using Members = std::vector<std::size_t>;
  for (const auto& [size, expected] :
       {std::pair(std::int64_t{1}, std::vector<Members>{{5}, {3}, {2}, {0}, {4, 1}}),
        std::pair(std::int64_t{16}, std::vector<Members>{{5}, {3}, {2, 0}, {4, 1}}),
        std::pair(std::int64_t{25}, std::vector<Members>{{5, 3}, {2, 0}, {4, 1}}),
        std::pair(kEverything, std::vector<Members>{{5, 3, 2, 0}, {4, 1}})}) {
    const auto buckets = make_grad_buckets(parameters, grads, size);
    ASSERT_EQ(buckets.size(), expected.size()) << size;
    for (auto& p : parameters) p.main_grad.zero_();
    for (std::size_t bucket = 0; bucket < buckets.size(); ++bucket) {
      EXPECT_EQ(buckets[bucket].parameters, expected[bucket]) << size;
      buckets[bucket].grads.add_(static_cast<double>(bucket + 1));
      for (const std::size_t i : expected[bucket]) {
        const at::Tensor& grad = parameters[i].main_grad;
        EXPECT_TRUE(grad.equal(at::full_like(grad, static_cast<double>(bucket + 1)))) << size;
      }
    }
  }
}

// Parameters that are used twice, frozen or not used at all; more buckets than may be in flight.
TEST(OverlappedReduction, GivesTheMeanHoweverParametersAreUsed) {
  const std::vector<std::size_t> uses{0, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 2, 9};
  const std::int64_t dropped = num_dropped_pending;
  for (const bool shared_memory : {true, false}) {
    for (const int ranks : {2, 3}) {
      for (const std::int64_t size : {std::int64_t{1}, std::int64_t{100}, kEverything}) {
        SCOPED_TRACE(fmt::format("shared memory {} ranks {} size {}", shared_memory, ranks, size));
        run_ranks(
            ranks,
            [&](const std::shared_ptr<Group>& dp) {
              auto parameters = make_parameters(16);  // 1 and 4 are not used
              parameters[5].value.set_requires_grad(false);
              const MainGrads grads = allocate_main_grads(parameters);
              const auto buckets = make_grad_buckets(parameters, grads, size);
              const auto tp = alone();
              for (int pass = 0; pass < 2; ++pass) {
                grads.flat.zero_();
                OverlappedReduction reduction(parameters, grads, buckets, *tp, *dp);
                loss_of(parameters, uses, dp->rank()).backward();
                reduction.finish();
                for (std::size_t i = 0; i < parameters.size(); ++i) {
                  const auto num = static_cast<int>(std::count(uses.begin(), uses.end(), i));
                  EXPECT_TRUE(parameters[i].main_grad.allclose(
                      expected(parameters[i], i, num, ranks), 1e-6, 0))
                      << parameters[i].name;
                }
              }
            },
            over(shared_memory));
      }
    }
  }
  EXPECT_EQ(num_dropped_pending, dropped);
}

TEST(OverlappedReduction, RanksMayComeToTheirGradientsInDifferentOrder) {
  run_ranks(
      3,
      [&](const std::shared_ptr<Group>& dp) {
        auto parameters = make_parameters(24);
        const MainGrads grads = allocate_main_grads(parameters);
        const auto buckets = make_grad_buckets(parameters, grads, 1);
        const auto tp = alone();
        std::vector<std::size_t> uses(24);
        for (std::size_t i = 0; i < uses.size(); ++i)
          uses[i] =
              i * std::vector<std::size_t>{1, 5, 23}[static_cast<std::size_t>(dp->rank())] % 24;
        ASSERT_EQ(std::set(uses.begin(), uses.end()).size(), 24u);
        OverlappedReduction reduction(parameters, grads, buckets, *tp, *dp);
        loss_of(parameters, uses, dp->rank()).backward();
        reduction.finish();
        for (std::size_t i = 0; i < parameters.size(); ++i)
          EXPECT_TRUE(parameters[i].main_grad.allclose(expected(parameters[i], i, 1, 3), 1e-6, 0));
      },
      over(true));
}

// What is partial over tp is summed there first, with the bits of the reduction after backward.
TEST(OverlappedReduction, SumsOverTpWhatIsPartial) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(
      4,
      [&](const std::shared_ptr<Group>& world) {
        const Mesh mesh = make_mesh(store, world->rank(), 4, 2, over(true));
        auto parameters = make_parameters(6);
        parameters[0].grad_partial_over_tp = parameters[5].grad_partial_over_tp = true;
        const MainGrads grads = allocate_main_grads(parameters);
        const auto buckets = make_grad_buckets(parameters, grads, 1);
        const std::vector<std::size_t> uses{0, 1, 2, 3, 4, 5};
        loss_of(parameters, uses, world->rank()).backward();
        reduce_gradients(grads, *mesh.tp, *mesh.dp);
        const at::Tensor plain = grads.flat.clone();
        grads.flat.zero_();
        OverlappedReduction reduction(parameters, grads, buckets, *mesh.tp, *mesh.dp);
        loss_of(parameters, uses, world->rank()).backward();
        reduction.finish();
        EXPECT_TRUE(grads.flat.equal(plain));
      },
      over(true));
}

TEST(OverlappedReduction, AnExceptionInBackwardLeavesNothingBehind) {
  run_ranks(
      2,
      [&](const std::shared_ptr<Group>& dp) {
        auto parameters = make_parameters(4);
        const MainGrads grads = allocate_main_grads(parameters);
        const auto buckets = make_grad_buckets(parameters, grads, 1);
        const auto tp = alone();
        const at::Tensor early = at::zeros({}).requires_grad_();
        early.register_hook(
            [](const at::Tensor&) -> at::Tensor { TORCH_CHECK(false, "in the middle"); });
        at::Tensor loss = loss_of(parameters, {0, 1}, dp->rank()) + early;
        loss = loss + loss_of(parameters, {2, 3}, dp->rank());  // backward comes to these first
        {
          const OverlappedReduction reduction(parameters, grads, buckets, *tp, *dp);
          EXPECT_THROW(loss.backward(), c10::Error);
          EXPECT_FALSE(parameters[2].main_grad.equal(at::zeros_like(parameters[2].main_grad)));
        }
        grads.flat.zero_();
        OverlappedReduction reduction(parameters, grads, buckets, *tp, *dp);
        loss_of(parameters, {0, 1, 2, 3}, dp->rank()).backward();
        reduction.finish();
        for (std::size_t i = 0; i < parameters.size(); ++i)
          EXPECT_TRUE(parameters[i].main_grad.equal(expected(parameters[i], i, 1, 2)));
      },
      over(true));
}

TEST(OverlappedReduction, ASecondBackwardIsRefused) {
  run_ranks(
      2,
      [&](const std::shared_ptr<Group>& dp) {
        auto parameters = make_parameters(2);
        const MainGrads grads = allocate_main_grads(parameters);
        const auto buckets = make_grad_buckets(parameters, grads, 1);
        const auto tp = alone();
        const OverlappedReduction reduction(parameters, grads, buckets, *tp, *dp);
        loss_of(parameters, {0, 1}, dp->rank()).backward();
        try {
          loss_of(parameters, {0, 1}, dp->rank()).backward();
          ADD_FAILURE() << "not refused";
        } catch (const c10::Error& error) {
          EXPECT_NE(std::string(error.what()).find("weight 1 was complete already"),
                    std::string::npos)
              << error.what();
        }
      },
      over(true));
}

/// One bucket that holds everything is meant.
struct Unwarned {
  Unwarned() { speaks = false; }
  ~Unwarned() { speaks = true; }
};

/// What each rank has after two steps.
struct Trained {
  std::vector<double> losses, norms;
  at::Tensor grads, weights;
};

std::vector<Trained> train(const TrainConfig& config, int ranks, bool shared_memory) {
  const Unwarned unwarned;
  std::vector<Trained> result(static_cast<std::size_t>(ranks));
  test::run_trainers(
      config, ranks,
      [&](Trainer& trainer, const DataSplit&, int rank) {
        Trained& mine = result[static_cast<std::size_t>(rank)];
        for (int i = 0; i < 2; ++i) {
          const auto step = trainer.step(i);
          mine.losses.push_back(step.loss);
          mine.norms.push_back(step.grad_norm);
        }
        std::vector<at::Tensor> grads, weights;
        for (const auto& p : trainer.model().parameters()) {
          grads.push_back(p.main_grad.reshape(-1));
          weights.push_back(p.value.detach().reshape(-1));
        }
        mine.grads = at::cat(grads), mine.weights = at::cat(weights);
      },
      over(shared_memory));
  return result;
}

TrainConfig config_for(int dp, int tp, bool sequence_parallel, std::int64_t micro_batches) {
  TrainConfig config = small_model();
  config.tensor_model_parallel_size = tp;
  config.sequence_parallel = sequence_parallel;
  config.micro_batch_size = 1;
  config.global_batch_size = dp * micro_batches;
  config.lr_warmup_iters = 0;
  config.deterministic = true;
  return config;
}

struct Case {
  int dp = 2, tp = 1;
  bool sequence_parallel = false, shared_memory = true, bf16 = false;
};

std::string name_of(const testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  return fmt::format("Dp{}Tp{}{}{}{}", c.dp, c.tp, c.sequence_parallel ? "Sp" : "",
                     c.shared_memory ? "" : "Gloo", c.bf16 ? "Bf16" : "");
}

class GradOverlapOn : public testing::TestWithParam<Case> {};

TEST_P(GradOverlapOn, ChangesNoBit) {
  const Case& c = GetParam();
  for (const std::int64_t micro_batches : {1, 3}) {
    for (const bool untied : {false, true}) {
      TrainConfig config = config_for(c.dp, c.tp, c.sequence_parallel, micro_batches);
      config.untie_embeddings_and_output_weights = untied;
      config.bf16 = c.bf16;
      const auto plain = train(config, c.dp * c.tp, c.shared_memory);
      config.overlap_grad_reduce = true;
      for (const char* recompute : {"", "uniform", "block"}) {
        if (!c.shared_memory && recompute == std::string("block"))
          continue;  // connecting takes long
        config.recompute_granularity = *recompute != '\0' ? "full" : "";
        config.recompute_method = recompute;
        config.recompute_num_layers = *recompute != '\0' ? 2 : 0;
        for (const std::int64_t size : {std::int64_t{1}, std::int64_t{15000}, kEverything}) {
          if (!c.shared_memory && size > 1) continue;
          SCOPED_TRACE(fmt::format("micro-batches {} untied {} recompute {} size {}", micro_batches,
                                   untied, recompute, size));
          config.ddp_bucket_size = size;
          const auto overlapped = train(config, c.dp * c.tp, c.shared_memory);
          for (std::size_t rank = 0; rank < plain.size(); ++rank) {
            EXPECT_EQ(overlapped[rank].losses, plain[rank].losses);
            EXPECT_EQ(overlapped[rank].norms, plain[rank].norms);
            EXPECT_TRUE(overlapped[rank].grads.equal(plain[rank].grads));
            EXPECT_TRUE(overlapped[rank].weights.equal(plain[rank].weights));
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Ranks, GradOverlapOn,
    testing::Values(Case{}, Case{.tp = 2}, Case{.tp = 2, .sequence_parallel = true},
                    Case{.dp = 3, .bf16 = true}, Case{.shared_memory = false},
                    Case{.tp = 2, .sequence_parallel = true, .shared_memory = false}),
    name_of);

// Gloo's order of sums depends on where a value lies in its message.
TEST(GradOverlap, IsCloseOverGlooOnThreeRanks) {
  TrainConfig config = config_for(3, 1, false, 2);
  const auto plain = train(config, 3, false);
  config.overlap_grad_reduce = true;
  config.ddp_bucket_size = 15000;
  const auto overlapped = train(config, 3, false);
  EXPECT_NEAR(overlapped[0].losses[1], plain[0].losses[1], 1e-6);
  EXPECT_TRUE(overlapped[0].grads.allclose(plain[0].grads, 1e-4, 1e-6));
}

/// The names of what a step of rank 0 does, in order.
std::vector<std::string> steps_of(TrainConfig config, int ranks, bool shared_memory,
                                  const std::function<void(Trainer&)>& step) {
  const Unwarned unwarned;
  static thread_local std::vector<std::string> seen;
  std::vector<std::string> result;
  test::run_trainers(
      std::move(config), ranks,
      [&](Trainer& trainer, const DataSplit&, int rank) {
        trainer.step(0);
        seen.clear();
        const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(
            [](const at::RecordFunction& fn) -> std::unique_ptr<at::ObserverContext> {
              seen.emplace_back(fn.name());
              return nullptr;
            }));
        step(trainer);
        at::removeCallback(handle);
        if (rank == 0) result = seen;
      },
      over(shared_memory));
  return result;
}

struct Order {
  std::ptrdiff_t before = 0, beside = 0,
                 after = 0;  // starts: up to the last backward, in it, later
};

/// `start` is what shows that a bucket starts.
Order order_of(const std::vector<std::string>& steps, const std::string& start) {
  const auto begin =
      std::find(steps.rbegin(), steps.rend(), "braid::cross_entropy_backward").base();
  const auto end = std::find(begin, steps.end(), "braid::embedding_backward");
  EXPECT_TRUE(begin != steps.begin() && end != steps.end());
  return {std::count(steps.begin(), begin, start), std::count(begin, end, start),
          std::count(end, steps.end(), start)};
}

void step(Trainer& trainer) { (void)trainer.step(1); }

TEST(GradOverlap, BucketsStartInTheLastBackwardAsSoonAsTheyAreComplete) {
  TrainConfig config = config_for(2, 1, false, 3);
  config.overlap_grad_reduce = true;
  config.ddp_bucket_size = 1;
  const char* publish = "braid::grad_reduce: publish";
  for (const char* recompute : {"", "uniform"}) {
    config.recompute_granularity = *recompute != '\0' ? "full" : "";
    const Order tied = order_of(steps_of(config, 2, true, step), publish);
    EXPECT_EQ(tied.before, 0);
    EXPECT_EQ(tied.beside, 19);  // all but the embedding
    EXPECT_EQ(tied.after, 1);
  }
  // Between hosts waits show, one or more a bucket: from the ninth start on, for the one eight before it.
  const Order between_hosts =
      order_of(steps_of(config, 2, /*shared_memory=*/false, step), "braid::grad_reduce: wait");
  EXPECT_EQ(between_hosts.before, 0);
  EXPECT_GE(between_hosts.beside, 19 - 8);
  EXPECT_GE(between_hosts.after, 8 + 1);

  config.recompute_granularity = "";
  config.untie_embeddings_and_output_weights = true;
  EXPECT_EQ(order_of(steps_of(config, 2, true, step), publish).beside, 20);
  config.tensor_model_parallel_size = 2;
  config.sequence_parallel = true;
  const Order norms = order_of(steps_of(config, 4, true, step), publish);
  EXPECT_EQ(norms.beside, 21 - 7 - 1);  // the norms are partial over tp
  EXPECT_EQ(norms.after, 3);            // embedding, norms over tp, norms over dp

  config.ddp_bucket_size = kEverything;
  EXPECT_EQ(order_of(steps_of(config, 4, true, step), publish).beside, 0);
  config.overlap_grad_reduce = false;
  EXPECT_EQ(order_of(steps_of(config, 4, true, step), publish).beside, 0);
}

// A late peer holds up no backward before as many buckets are in flight as may be.
TEST(GradOverlap, BackwardDoesNotWaitForTheBuckets) {
  TrainConfig config = config_for(2, 1, false, 1);
  config.overlap_grad_reduce = true;
  config.ddp_bucket_size = 30000;
  const auto steps = steps_of(config, 2, true, step);
  const auto end = std::find(steps.begin(), steps.end(), "braid::embedding_backward");
  EXPECT_GT(std::count(steps.begin(), end, "braid::grad_reduce: publish"), 2);
  EXPECT_EQ(std::count(steps.begin(), end, "braid::grad_reduce: wait"), 0);
  EXPECT_EQ(std::count(steps.begin(), end, "braid::grad_reduce: reduce"), 0);
}

TEST(GradOverlap, SaysSoWhereOneBucketHoldsEverything) {
  for (const bool sequence_parallel : {false, true}) {
    TrainConfig config = config_for(2, 2, sequence_parallel, 1);
    config.overlap_grad_reduce = true;
    for (const auto& [size, says] :
         {std::pair(std::int64_t{0}, true), {std::int64_t{1000}, false}}) {
      config.ddp_bucket_size = size;
      testing::internal::CaptureStderr();
      test::run_trainers(
          config, 4, [](Trainer&, const DataSplit&, int) {}, over(true));
      const std::string text = testing::internal::GetCapturedStderr();
      EXPECT_EQ(text.find("--overlap-grad-reduce overlaps nothing: the ") != std::string::npos,
                says)
          << text;
    }
  }
}

TEST(GradOverlap, SerialStepsReduceAfterBackward) {
  TrainConfig config = config_for(2, 1, false, 1);
  config.overlap_grad_reduce = true;
  config.ddp_bucket_size = 1;
  const Order order = order_of(steps_of(config, 2, true,
                                        [](Trainer& trainer) {
                                          const auto totals = trainer.serial_step(1);
                                          EXPECT_GT(totals.at("grad_reduce").exposed_s(), 0);
                                        }),
                               "braid::grad_reduce: publish");
  EXPECT_EQ(order.beside, 0);
  EXPECT_GT(order.after, 0);
}

}  // namespace
}  // namespace braid
