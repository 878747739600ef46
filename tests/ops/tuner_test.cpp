// The tuner: the same choice on all ranks, kept, given back.
#include "braid/ops/tuner.h"

#include <gtest/gtest.h>

#include <mutex>

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
    const int again = tuner::choose(*group, key, {}, [&](int) { ++trials; });
    EXPECT_EQ(trials, 0);
    const std::lock_guard lock(mutex);
    tables.push_back(tuner::choices());
    EXPECT_EQ(tables.back().at("matmul_all_reduce 90 16 96 Float 3 host").template get<int>(),
              again);
  });
  EXPECT_EQ(tables[0].size(), 2);
  EXPECT_EQ(tables[0], tables[1]);
  EXPECT_EQ(tables[0], tables[2]);
}

TEST(Tuner, WithoutLiveTuningNothingIsTried) {
  test::run_ranks(2, [&](const auto& group) {
    tuner::allow_live(false);
    const auto fail = [](int) { FAIL(); };
    EXPECT_EQ(tuner::choose(*group, {"matmul_all_reduce", 16, 64, 64, at::kFloat}, {}, fail), 1);
    EXPECT_EQ(tuner::choose(*group, {"matmul_all_reduce", 4096, 64, 64, at::kFloat}, {}, fail), 0);
    tuner::set_choices({{"matmul_all_reduce 32 64 64 Float 2 host", 4}});
    EXPECT_EQ(tuner::choose(*group, {"matmul_all_reduce", 32, 64, 64, at::kFloat}, {}, fail), 4);
    EXPECT_THROW(tuner::set_choices({{"key", "fast"}}), c10::ValueError);
    EXPECT_THROW(tuner::set_choices(nlohmann::json::array()), c10::ValueError);
  });
}

}  // namespace
}  // namespace braid
