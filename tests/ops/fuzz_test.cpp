// Thousands of random operations with ranks as threads: right results, that stay what they are while they are held.
#include "tests/support/fuzz.h"

#include <cstdlib>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace braid {
namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kSteps = 300, kSequences = 600;
#else
constexpr int kSteps = 1200, kSequences = 1500;
#endif

/// The host of each rank.
class FuzzTest : public testing::TestWithParam<test::HostNumbers> {};
INSTANTIATE_TEST_SUITE_P(Ranks, FuzzTest,
                         testing::Values(test::HostNumbers{0, 0}, test::HostNumbers{0, 0, 0},
                                         test::HostNumbers{0, 0, 0, 0}, test::HostNumbers{0, 1},
                                         test::HostNumbers{0, 1, 1}, test::HostNumbers{0, 1, 2},
                                         test::HostNumbers{0, 1, 1, 0}));

TEST_P(FuzzTest, RanksAsThreads) {
  const int size = static_cast<int>(GetParam().size());
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::deque<test::Held>> left(static_cast<std::size_t>(size));
  test::run_ranks(
      size,
      [&](const auto& group) {
        const auto second =
            Group::create(store, "second", group->rank(), size, test::on_hosts(GetParam()));
        test::Fuzz fuzz(*group, *second, 1000u + static_cast<unsigned>(size));
        left[static_cast<std::size_t>(group->rank())] =
            fuzz.run(group->on_one_host() ? kSteps : kSteps / 4);
      },
      test::on_hosts(GetParam()));
  // The groups are gone; this is another thread than the one that made the results.
  for (auto& rank : left) {
    for (test::Held& held : rank) {
      held.check();
      held.result.fill_(1);
    }
  }
  EXPECT_EQ(num_dropped_pending, 0);
}

/// Short sequences over four ranks, each in groups of four, of two neighbours, of two that are two
/// apart, or of three and one. `make test-fuzz` runs 10,000 of them (BRAID_FUZZ_SEQUENCES).
TEST(FuzzSequences, OfFourRanksInAnyGroups) {
  const char* text = std::getenv("BRAID_FUZZ_SEQUENCES");
  const int num_sequences = text != nullptr ? std::stoi(text) : kSequences;
  const std::vector<std::vector<std::vector<int>>> splits{
      {{0, 1, 2, 3}}, {{0, 1}, {2, 3}}, {{0, 2}, {1, 3}}, {{0, 2, 3}, {1}}};
  const auto store = c10::make_intrusive<c10d::HashStore>();
  test::run_ranks(4, [&](const auto& world) {
    struct Pair {
      std::shared_ptr<Group> first, second;
      unsigned number;
    };
    std::vector<Pair> groups;
    for (unsigned s = 0; s < splits.size(); ++s) {
      for (const auto& members : splits[s]) {
        const auto me = std::find(members.begin(), members.end(), world->rank());
        if (me == members.end()) continue;
        const auto make = [&](const char* which) {
          return Group::create(store, fmt::format("{} {} {}", which, s, members[0]),
                               static_cast<int>(me - members.begin()),
                               static_cast<int>(members.size()));
        };
        groups.push_back(
            {make("first"), make("second"), 10 * s + static_cast<unsigned>(members[0])});
      }
    }
    std::mt19937 generator(5);  // the same on all ranks
    for (int i = 0; i < num_sequences && !testing::Test::HasFailure(); ++i) {
      const Pair& pair = groups[generator() % groups.size()];
      const auto steps = static_cast<int>(1 + generator() % 6);
      test::Fuzz fuzz(*pair.first, *pair.second, 100 * static_cast<unsigned>(i) + pair.number);
      (void)fuzz.run(steps);
    }
  });
  EXPECT_EQ(num_dropped_pending, 0);
}

}  // namespace
}  // namespace braid
