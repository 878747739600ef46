// The tuner: the same choice on all ranks, kept, given back.
#include "braid/ops/tuner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <mutex>
#include <set>
#include <thread>

#include "braid/comm/collectives.h"
#include "tests/support/ranks.h"

namespace braid {
namespace {

TEST(Tuner, RanksAgreeAndRemember) {
  std::mutex mutex;
  std::vector<nlohmann::json> tables;
  test::run_ranks(3, [&](const auto& group) {
    const at::Tensor x = test::rank_values(group->rank(), {90, 32}),
                     w = test::rank_values(3, {16, 32});
    (void)matmul_all_reduce(*group, x, w);
    (void)all_gather_matmul(*group, x, w);
    int trials = 0;
    const tuner::Key key{"matmul_all_reduce", 90, 16, 96, at::kFloat};
    const Plan again = tuner::choose(*group, key, {}, [&](const Plan&) { ++trials; });
    EXPECT_EQ(trials, 0);
    const std::lock_guard lock(mutex);
    tables.push_back(tuner::choices());
    EXPECT_EQ(tuner::measured(), tuner::choices());
    EXPECT_EQ(tables.back().at("matmul_all_reduce m=128 n=16 k=96 f32 ranks=3 host"),
              to_text(again));
  });
  EXPECT_EQ(tables[0].size(), 2);
  EXPECT_EQ(tables[0], tables[1]);
  EXPECT_EQ(tables[0], tables[2]);
}

void fail(const Plan&) { FAIL() << "nothing is to be tried"; }

TEST(Tuner, WithoutLiveTuningNothingIsTried) {
  test::run_ranks(2, [&](const auto& group) {
    tuner::allow_live(false);
    const auto choose = [&](std::int64_t m) {
      return to_text(tuner::choose(*group, {"matmul_all_reduce", m, 64, 64, at::kFloat}, {}, fail));
    };
    EXPECT_EQ(choose(16), "serial");
    EXPECT_EQ(choose(4096), "fused");
    tuner::set_choices({{"matmul_all_reduce m=32 n=64 k=64 f32 ranks=2 host", "chunked 4"}});
    EXPECT_EQ(choose(32), "chunked 4");
    EXPECT_EQ(choose(17), "chunked 4");
    EXPECT_TRUE(tuner::measured().empty());
    EXPECT_THROW(tuner::set_choices({{"key", "fast"}}), c10::ValueError);
    EXPECT_THROW(tuner::set_choices({{"key", 1}}), c10::ValueError);
    EXPECT_THROW(tuner::set_choices(nlohmann::json::array()), c10::ValueError);
  });
}

TEST(Tuner, APinGoesBeforeAMeasuredChoiceAndTheMostExactPinFirst) {
  test::run_ranks(2, [&](const auto& group) {
    tuner::set_choices({{"matmul_all_reduce m=32 n=64 k=64 f32 ranks=2 host", "chunked 4"},
                        {"* m=* n=64 k=* * * host", "chunked 2"},
                        {"matmul_all_reduce m=* n=64 k=64 f32 ranks=2 host", "chunked 3"},
                        {"matmul_all_reduce m=* n=64", "chunked 5"}});
    const auto choose = [&](const char* op, std::int64_t k) {
      return to_text(tuner::choose(*group, {op, 32, 64, k, at::kFloat}, {}, fail));
    };
    EXPECT_EQ(tuner::unused_pins().size(), 3u);
    EXPECT_EQ(choose("matmul_all_reduce", 64), "chunked 3");
    EXPECT_EQ(choose("matmul_all_reduce", 65), "chunked 2");
    EXPECT_EQ(choose("all_gather_wgrad", 64), "chunked 2");
    if (group->rank() == 0) {  // whose choices count
      EXPECT_EQ(tuner::unused_pins(), std::vector<std::string>{"matmul_all_reduce m=* n=64"});
    }
    tuner::set_choices({{"* m=* n=* k=* * * *", "fused ring native"}});
    EXPECT_EQ(choose("all_gather_wgrad", 64), "chunked 2");
    EXPECT_EQ(to_text(tuner::choose(*group, {"all_gather_matmul", 32, 7, 7, at::kFloat}, {}, fail)),
              "fused");
  });
}

TEST(Tuner, RanksThatKnowDifferentChoicesRunWithRankZeros) {
  test::run_ranks(2, [&](const auto& group) {
    tuner::set_choices({{"* m=* n=* k=* * * *", group->rank() == 0 ? "chunked 3" : "serial"}});
    const tuner::Key key{"matmul_all_reduce", 32, 64, 64, at::kFloat};
    EXPECT_EQ(to_text(tuner::choose(*group, key, {}, fail)), "chunked 3");
  });
}

TEST(Tuner, EveryHalfAndReducingFormIsTried) {
  const auto tried = [](const Group& group, bool has_native) {
    std::set<std::string> plans;
    (void)tuner::choose(group, {"matmul_all_reduce", 512, 1, 1, at::kHalf, true, has_native}, {},
                        [&](const Plan& plan) { plans.insert(to_text(plan)); });
    return plans;
  };
  test::run_ranks(3, [&](const auto& group) {
    EXPECT_EQ(tried(*group, true),
              (std::set<std::string>{"serial", "fused", "fused ring", "chunked 2", "serial native",
                                     "fused native", "chunked 2 native"}));
  });
  test::run_ranks(
      3,
      [&](const auto& group) {
        EXPECT_EQ(tried(*group, false),
                  (std::set<std::string>{"serial", "fused", "chunked 2", "chunked 4", "chunked 6",
                                         "chunked 8", "chunked 16"}));
      },
      test::on_hosts({0, 1, 1}));
}

TEST(Tuner, BetweenHostsFusedIsAPlanAndRingsAreNone) {
  test::run_ranks(
      2,
      [&](const auto& group) {
        const auto choose = [&](std::int64_t m) {
          return to_text(
              tuner::choose(*group, {"matmul_all_reduce", m, 64, 64, at::kFloat, true}, {}, fail));
        };
        tuner::set_choices({{"matmul_all_reduce m=16 n=64 k=64 f32 ranks=2 network", "fused"},
                            {"* m=32 n=* k=* * * *", "fused ring"}});
        EXPECT_EQ(choose(16), "fused");
        EXPECT_EQ(choose(32), "fused");
      },
      test::on_hosts({0, 1}));
}

TEST(Tuner, BetweenHostsOfEquallyFastPlansTheOneWithFewerTilesIsChosen) {
  test::run_ranks(
      2,
      [&](const auto& group) {
        const auto trial = [](const Plan& plan) {
          const int ms = plan.num_chunks == 1 ? 70 : plan.num_chunks == 2 ? 45 : 40;
          std::this_thread::sleep_for(std::chrono::milliseconds(ms));
        };
        EXPECT_EQ(
            to_text(tuner::choose(*group, {"all_gather_matmul", 512, 1, 1, at::kFloat}, {}, trial)),
            "fused");
      },
      test::on_hosts({0, 1}));
}

TEST(Tuner, PlansThatARankHasNoMemoryForAreNotChosen) {
  test::run_ranks(2, [&](const auto& group) {
    const auto choose = [&](const char* op, bool serial_fits) {
      const auto trial = [&](const Plan& plan) {
        if (plan.num_chunks == 1 && serial_fits) return;
        const std::int64_t rows = group->rank() == 1 ? std::int64_t{1} << 44 : 1;
        (void)all_gather(*group, at::ones({1, 1}).expand({rows, 1}));
      };
      return to_text(tuner::choose(*group, {op, 2048, 64, 64, at::kFloat}, {}, trial));
    };
    EXPECT_EQ(choose("all_gather_matmul", true), "serial");
    EXPECT_EQ(tuner::plans_in_use().size(), 1u);
    EXPECT_THROW((void)choose("all_gather_wgrad", false), c10::OutOfMemoryError);
  });
}

TEST(Tuner, RanksThatAskForDifferentProductsAreTold) {
  test::run_ranks(2, [&](const auto& group) {
    for (int repeat = 0; repeat < 2; ++repeat)  // nothing is remembered of it
      EXPECT_THROW(
          (void)tuner::choose(
              *group, {"matmul_all_reduce", 1000 + group->rank(), 64, 64, at::kFloat}, {}, fail),
          c10::ValueError);
  });
}

TEST(PlanText, GoesThereAndBack) {
  for (const char* text : {"serial", "serial native", "fused", "fused ring", "fused native",
                           "chunked 2", "chunked 17 native"})
    EXPECT_EQ(to_text(plan_from_text(text)), text);
  for (const char* text : {"", "fast", "chunked", "chunked 1", "chunked x", "chunked 2 ring",
                           "serial ring", "fused direct", "fused 2"})
    EXPECT_THROW((void)plan_from_text(text), c10::ValueError) << text;
}

}  // namespace
}  // namespace braid
