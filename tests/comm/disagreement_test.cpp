// Ranks that call different things, or lack memory: the same error on every rank, and the group works on.
#include <gmock/gmock.h>

#include "braid/comm/collectives.h"
#include "braid/comm/shared_memory.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace braid {
namespace {

using std::chrono_literals::operator""s;
using testing::HasSubstr;

struct Case {
  const char* name;
  std::function<void(const Group&, bool deviates)> call;
  const char* text;
  bool is_of_memory = false;  // else of the callers' values
};

const std::vector<std::int64_t> kOnes{1, 1, 1};

std::vector<Case> cases() {
  const auto ones = [](std::int64_t rows, std::int64_t columns, at::ScalarType dtype = at::kFloat) {
    return at::ones({rows, columns}, dtype);
  };
  return {
      {"operation",
       [=](const Group& g, bool other) { other ? barrier(g) : (void)all_reduce(g, ones(2, 2)); },
       "disagree in the operation: all_reduce and barrier"},
      {"dtype",
       [=](const Group& g, bool other) {
         (void)all_gather(g, ones(2, 2, other ? at::kHalf : at::kFloat));
       },
       "all_gather: ranks 0 and 1 of group"},
      {"dtype_of_equal_size",
       [=](const Group& g, bool other) {
         (void)all_reduce(g, ones(2, 2, other ? at::kInt : at::kFloat));
       },
       "disagree in dtype: Float and Int"},
      {"rows_of_ranks",
       [=](const Group& g, bool other) {
         const std::int64_t mine = g.rank() == 0 ? 5 : 4;
         auto rows = std::vector<std::int64_t>{5, 4, 4};
         if (other) rows[g.rank() == 2 ? 0 : 2] = 9;
         (void)all_gather(g, ones(mine, 2), rows);
       },
       "disagree in all ranks' rows"},
      {"columns", [=](const Group& g, bool other) { (void)all_gather(g, ones(2, other ? 3 : 2)); },
       "disagree in n: 2 and 3"},
      {"rows", [=](const Group& g, bool other) { (void)reduce_scatter(g, ones(other ? 4 : 5, 2)); },
       "disagree in rows: 5 and 4"},
      {"no_rows", [=](const Group& g, bool other) { (void)all_reduce(g, ones(other ? 0 : 5, 2)); },
       "disagree in rows: 5 and 0"},
      {"transposed",
       [=](const Group& g, bool other) { (void)all_reduce(g, other ? ones(3, 2) : ones(2, 3)); },
       "all_reduce: ranks 0 and 1 of group"},
      {"large_and_small",
       [=](const Group& g, bool other) { (void)all_reduce(g, ones(other ? 2 : 2000, 100)); },
       "disagree in rows: 2000 and 2"},
      {"one_rank_without_room",
       [=](const Group& g, bool other) {
         (void)all_gather(g, other ? ones(1, 1).expand({std::int64_t{1} << 44, 1}) : ones(2, 1));
       },
       "can't take part: 70368744177664 bytes don't fit into a slot of", /*is_of_memory=*/true},
      {"split_of_rows",
       [=](const Group& g, bool other) {
         (void)reduce_scatter(
             g, ones(6, 2),
             other ? std::vector<std::int64_t>{1, 2, 3} : std::vector<std::int64_t>{2, 2, 2});
       },
       "disagree in split of rows (hash)"},
      {"reduction",
       [=](const Group& g, bool other) {
         (void)all_reduce(g, ones(2, 2), other ? ReduceOp::max : ReduceOp::sum);
       },
       "disagree in reduction: 0 and 1"},
      {"root", [=](const Group& g, bool other) { (void)broadcast(g, ones(2, 2), other ? 2 : 0); },
       "disagree in root: 0 and 2"},
      {"splits_that_do_not_transpose",
       [=](const Group& g, bool other) {
         (void)start_all_to_all(g, ones(other ? 4 : 3, 2),
                                other ? std::vector<std::int64_t>{1, 1, 2} : kOnes, kOnes)
             .wait();
       },
       "sends 2 rows to rank 2, which expects 1"},
      // Numbers of operations that differ.
      {"more_in_flight",
       [=](const Group& g, bool other) {
         std::vector<Pending<at::Tensor>> more;
         for (int i = 0; other && i < 5; ++i) more.push_back(start_all_gather(g, ones(i, 2)));
         (void)all_reduce(g, ones(2, 2));
       },
       "disagree in the operation: all_reduce and all_gather"},
      {"fewer_in_flight",
       [=](const Group& g, bool other) {
         std::vector<Pending<at::Tensor>> more;
         for (int i = 0; !other && i < 5; ++i) more.push_back(start_all_gather(g, ones(i, 2)));
         (void)broadcast(g, ones(2, 2), 0);
       },
       "all_gather and broadcast"},
  };
}

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class Disagreement : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Calls, Disagreement, testing::ValuesIn(cases()),
                         [](const auto& c) { return c.param.name; });

TEST_P(Disagreement, IsTheSameErrorOnEveryRankAndTheGroupWorksOn) {
  constexpr int kRanks = 3, kDeviating = 1;
  std::vector<std::string> texts(kRanks);
  test::run_ranks(
      kRanks,
      [&](const auto& group) {
        for (int repeat = 0; repeat < 3; ++repeat) {
          try {
            GetParam().call(*group, group->rank() == kDeviating);
            ADD_FAILURE() << "no error";
          } catch (const c10::Error& error) {
            texts[static_cast<std::size_t>(group->rank())] = error.what_without_backtrace();
            const bool is_of_memory = dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr;
            EXPECT_EQ(is_of_memory, GetParam().is_of_memory);
            EXPECT_EQ(dynamic_cast<const c10::ValueError*>(&error) == nullptr, is_of_memory);
          }
          const at::Tensor x = test::rank_integers(group->rank(), {50, 3});
          EXPECT_TRUE(at::equal(all_gather(*group, x), at::cat({test::rank_integers(0, {50, 3}),
                                                                test::rank_integers(1, {50, 3}),
                                                                test::rank_integers(2, {50, 3})})));
        }
      },
      {20s, true});
  EXPECT_THAT(texts[0], HasSubstr(GetParam().text));
  EXPECT_EQ(texts[0], texts[1]);
  EXPECT_EQ(texts[0], texts[2]);
  num_dropped_pending = 0;  // on purpose here
}

// Rank 1 learns of it while it waits for an operation that agrees, and would have started one more before it came to
// the one that does not.
TEST(Disagreement, IsMetBeforeAnyFurtherOperationIsStarted) {
  test::run_ranks(2,
                  [](const auto& group) {
                    const at::Tensor large = at::ones({400, 500});  // its result is waited for
                    EXPECT_THROW(
                        {
                          auto first = start_all_reduce(*group, large);
                          if (group->rank() == 0) {
                            (void)start_all_gather(*group, large).wait();
                          } else {
                            auto second = start_all_reduce(*group, large);
                            (void)first.wait();
                            auto third = start_all_reduce(*group, large);
                            (void)second.wait();
                          }
                        },
                        c10::ValueError);
                    EXPECT_EQ(all_reduce(*group, at::ones({2})).sum().template item<float>(), 4);
                  },
                  {5s, true});
  num_dropped_pending = 0;  // on purpose here
}

TEST(Disagreement, EarliestOfSeveralIsTheErrorOfAll) {
  std::vector<std::string> texts(2);
  test::run_ranks(
      2,
      [&](const auto& group) {
        const at::Tensor x = at::ones({2 + group->rank(), 2});
        auto first = start_reduce_scatter(*group, x);
        auto second = start_all_reduce(*group, x);
        auto& waited_for = group->rank() == 0 ? second : first;
        try {
          (void)waited_for.wait();
          ADD_FAILURE() << "no error";
        } catch (const c10::ValueError& error) {
          texts[static_cast<std::size_t>(group->rank())] = error.what_without_backtrace();
        }
        EXPECT_THROW((void)(group->rank() == 0 ? first : second).wait(), c10::ValueError);
        EXPECT_EQ(all_reduce(*group, at::ones({2})).sum().template item<float>(), 4);
      },
      {5s, true});
  EXPECT_THAT(texts[0], HasSubstr("reduce_scatter: ranks 0 and 1 of group"));
  EXPECT_EQ(texts[0], texts[1]);
}

TEST(Disagreement, InTheSizeOfAGroupIsAnErrorOnEveryRankAndOtherGroupsWorkOn) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (const int other : {2, 4}) {
    for (const bool shared_memory : {true, false}) {
      const auto before = std::chrono::steady_clock::now();
      test::run_ranks(
          3,
          [&](const auto& group) {
            const std::string name = fmt::format("odd {} {}", other, shared_memory);
            EXPECT_THAT(test::value_error([&] {
                          (void)Group::create(store, name, group->rank(),
                                              group->rank() == 1 ? other : 3, {20s, shared_memory});
                        }),
                        testing::AllOf(HasSubstr("disagree in its size"), HasSubstr("3"),
                                       HasSubstr(std::to_string(other))));
            EXPECT_EQ(all_reduce(*group, at::ones({2})).sum().template item<float>(), 6);
          },
          {20s, true});
      EXPECT_LT(std::chrono::steady_clock::now() - before, 10s);  // no time-out
    }
  }
}

TEST(Disagreement, InSplitsIsTheSameErrorOnEveryRankOfSeveralHosts) {
  for (const test::HostNumbers& hosts : std::vector<test::HostNumbers>{{0, 1}, {0, 1, 1, 0}}) {
    const auto size = hosts.size();
    test::run_ranks(
        static_cast<int>(size),
        [&](const auto& group) {
          const std::vector<std::int64_t> ones(size, 1);
          std::vector<std::int64_t> send = ones;
          if (group->rank() == 0) send.back() = 2;
          const at::Tensor x = at::ones({std::reduce(send.begin(), send.end()), 2});
          EXPECT_THAT(
              test::value_error([&] { (void)start_all_to_all(*group, x, send, ones).wait(); }),
              HasSubstr(fmt::format("rank 0 of group {} sends 2 rows to rank {}, which expects 1",
                                    group->name(), size - 1)));
        },
        test::on_hosts(hosts, 5s));
  }
}

}  // namespace
}  // namespace braid
