// Ranks as processes: kills and freezes inside the fused and chunked operations; the fuzz with mappings of their own.
#include "tests/support/faults.h"

#include "tests/support/fuzz.h"

namespace braid {
namespace {

struct Case {
  const char* name;
  test::Operation operation;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

constexpr MatmulOptions kFused{Mode::fused}, kChunked{Mode::chunked, 3};

std::vector<Case> cases() {
  const auto x = [] { return at::ones({400, 64}); };
  const auto w = [] { return at::ones({300, 64}); };
  return {
      {"all_gather_matmul",
       [=](const Group& g) { (void)all_gather_matmul(g, x(), w(), {}, kFused); }},
      {"matmul_reduce_scatter",
       [=](const Group& g) { (void)matmul_reduce_scatter(g, x(), w(), {}, kFused); }},
      {"matmul_all_reduce",
       [=](const Group& g) { (void)matmul_all_reduce(g, x(), w(), {}, kFused); }},
      {"chunked_matmul_all_reduce",
       [=](const Group& g) { (void)matmul_all_reduce(g, x(), w(), {}, kChunked); }},
      {"two_in_flight",
       [=](const Group& g) {
         auto first = start_matmul_reduce_scatter(g, x(), w(), {}, kFused);
         auto second = start_matmul_all_reduce(g, x(), w(), {}, kFused);
         (void)first.wait(), (void)second.wait();
       }},
  };
}

class KilledRank : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Ops, KilledRank, testing::ValuesIn(cases()),
                         [](const auto& c) { return c.param.name; });
TEST_P(KilledRank, IsNamedByAll) { test::expect_killed_rank_is_named(GetParam().operation); }

TEST(FrozenRank, IsNamedByAll) {
  test::expect_frozen_rank_is_named([](const Group& g) {
    (void)matmul_all_reduce(g, at::ones({400, 64}), at::ones({300, 64}), {}, kFused);
  });
}

TEST(Fuzz, RanksAsProcesses) {
  test::run_ranks_as_processes(3, [](const Place& place, const auto& store) {
    at::set_num_threads(1);
    const auto first = Group::create(store, "first", place.rank, 3),
               second = Group::create(store, "second", place.rank, 3);
    test::Fuzz(*first, *second, 77).run(1500);
    EXPECT_EQ(num_dropped_pending, 0);
  });
}

}  // namespace
}  // namespace braid
