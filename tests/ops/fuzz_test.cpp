// Thousands of random operations with ranks as threads: right results, that stay what they are while they are held.
#include "tests/support/fuzz.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace braid {
namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kSteps = 300;
#else
constexpr int kSteps = 1200;
#endif

class FuzzTest : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, FuzzTest, testing::Values(2, 3, 4));

TEST_P(FuzzTest, RanksAsThreads) {
  const int size = GetParam();
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::deque<test::Held>> left(static_cast<std::size_t>(size));
  test::run_ranks(size, [&](const auto& group) {
    const auto second = Group::create(store, "second", group->rank(), size);
    test::Fuzz fuzz(*group, *second, 1000u + static_cast<unsigned>(size));
    left[static_cast<std::size_t>(group->rank())] = fuzz.run(kSteps);
  });
  // The groups are gone; this is another thread than the one that made the results.
  for (auto& rank : left) {
    for (test::Held& held : rank) {
      held.check();
      held.result.fill_(1);
    }
  }
  EXPECT_EQ(num_dropped_pending, 0);
}

}  // namespace
}  // namespace braid
