// Collectives over both transports, against sums and concatenations made in one place.
#include "braid/comm/collectives.h"

#include <gtest/gtest.h>

#include "braid/comm/shared_memory.h"
#include "braid/comm/texts.h"
#include "tests/support/ranks.h"

namespace braid {
namespace {

using test::rank_integers;
using test::rank_values;
using test::run_ranks;

/// The host of each rank.
class Collectives : public testing::TestWithParam<test::HostNumbers> {
 protected:
  int size() const { return static_cast<int>(GetParam().size()); }
  GroupOptions options() const { return test::on_hosts(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(
    Ranks, Collectives,
    testing::Values(test::HostNumbers{0}, test::HostNumbers{0, 0}, test::HostNumbers{0, 1},
                    test::HostNumbers{0, 0, 0}, test::HostNumbers{0, 1, 2},
                    test::HostNumbers{0, 1, 1}, test::HostNumbers{0, 0, 0, 0},
                    test::HostNumbers{0, 1, 2, 3}, test::HostNumbers{0, 0, 1, 1},
                    test::HostNumbers{0, 1, 0, 1}, test::HostNumbers{1, 0, 0, 0},
                    test::HostNumbers{2, 0, 0, 1, 2, 1, 1, 2}),
    [](const auto& hosts) { return fmt::format("Hosts{}", fmt::join(hosts.param, "")); });

TEST_P(Collectives, AllGatherOfUnevenShards) {
  std::vector<at::Tensor> shards;
  for (int r = 0; r < size(); ++r) shards.push_back(rank_values(r, {3 * r + (r == 2 ? -6 : 1), 5}));
  run_ranks(
      size(),
      [&](const auto& group) {
        const at::Tensor& mine = shards[static_cast<std::size_t>(group->rank())];
        for (int repeat = 0; repeat < 6; ++repeat) {
          EXPECT_TRUE(at::equal(all_gather(*group, mine + repeat), at::cat(shards) + repeat));
          // A strided view of the same values.
          EXPECT_TRUE(at::equal(all_gather(*group, mine.t().contiguous().t()), at::cat(shards)));
        }
      },
      options());
}

TEST_P(Collectives, ReduceScatterAndAllReduce) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble, at::kLong}) {
    for (const std::int64_t rows : {0, 1, 2, 7, 64}) {
      const std::int64_t columns = rows == 64 ? 3001 : 3;  // the last is above the one-shot size
      at::Tensor sum = at::zeros({rows, columns}, at::kDouble),
                 largest = at::full({rows, columns}, -100.0);
      for (int r = 0; r < size(); ++r) {
        sum += rank_integers(r, {rows, columns}, at::kDouble);
        largest = at::maximum(largest, rank_integers(r, {rows, columns}));
      }
      run_ranks(
          size(),
          [&](const auto& group) {
            at::Tensor x = rank_integers(group->rank(), {rows, columns}, dtype);
            const auto parts = sum.split_with_sizes(split_rows(rows, size()));
            EXPECT_TRUE(at::equal(reduce_scatter(*group, x).to(at::kDouble),
                                  parts[static_cast<std::size_t>(group->rank())]));
            EXPECT_TRUE(at::equal(all_reduce(*group, x, ReduceOp::max).to(at::kFloat), largest));
            EXPECT_TRUE(at::equal(all_reduce(*group, x).to(at::kDouble), sum));
            all_reduce(*group, x, ReduceOp::sum, x);
            EXPECT_TRUE(at::equal(x.to(at::kDouble), sum));
            barrier(*group);  // without rows nobody waits for anybody, not even to connect
          },
          options());
    }
  }
}

TEST_P(Collectives, AllReduceIntoAStridedView) {
  run_ranks(
      size(),
      [&](const auto& group) {
        at::Tensor base = at::zeros({4, 6});
        at::Tensor view = base.narrow(1, 1, 3);
        view.copy_(rank_integers(group->rank(), {4, 3}));
        all_reduce(*group, view, ReduceOp::sum, view);
        at::Tensor sum = at::zeros({4, 3});
        for (int r = 0; r < size(); ++r) sum += rank_integers(r, {4, 3});
        EXPECT_TRUE(at::equal(base.narrow(1, 1, 3), sum));
        EXPECT_EQ(base.narrow(1, 4, 2).abs().sum().item<float>(), 0);
      },
      options());
}

TEST_P(Collectives, AllToAllWithUnevenSplits) {
  // Rank s sends s + 2 d rows to rank d, and none to itself from rank 0.
  const auto rows = [](int source, int target) {
    return static_cast<std::int64_t>(source + 2 * target);
  };
  run_ranks(
      size(),
      [&](const auto& group) {
        std::vector<std::int64_t> send, recv;
        std::vector<at::Tensor> expected;
        for (int peer = 0; peer < size(); ++peer) {
          send.push_back(rows(group->rank(), peer));
          recv.push_back(rows(peer, group->rank()));
          std::int64_t before = 0;
          for (int d = 0; d < group->rank(); ++d) before += rows(peer, d);
          std::int64_t total = 0;
          for (int d = 0; d < size(); ++d) total += rows(peer, d);
          expected.push_back(rank_values(peer, {total, 2}).narrow(0, before, recv.back()));
        }
        const std::int64_t total = std::accumulate(send.begin(), send.end(), std::int64_t{0});
        EXPECT_TRUE(at::equal(
            start_all_to_all(*group, rank_values(group->rank(), {total, 2}), send, recv).wait(),
            at::cat(expected)));
      },
      options());
}

TEST_P(Collectives, SeveralInFlightAndBroadcast) {
  run_ranks(
      size(),
      [&](const auto& group) {
        for (int repeat = 0; repeat < 10; ++repeat) {
          auto a = start_all_gather(*group, rank_values(group->rank(), {2, 2}) + repeat);
          auto b = start_all_reduce(*group, rank_integers(group->rank(), {repeat + 1, 40}));
          auto c = start_reduce_scatter(*group, rank_integers(group->rank() + repeat, {9, 3}));
          at::Tensor sum = at::zeros({9, 3}), whole = at::zeros({repeat + 1, 40});
          std::vector<at::Tensor> shards;
          for (int r = 0; r < size(); ++r) {
            sum += rank_integers(r + repeat, {9, 3});
            whole += rank_integers(r, {repeat + 1, 40});
            shards.push_back(rank_values(r, {2, 2}) + repeat);
          }
          EXPECT_TRUE(
              at::equal(c.wait(), sum.split_with_sizes(split_rows(
                                      9, size()))[static_cast<std::size_t>(group->rank())]));
          EXPECT_TRUE(at::equal(a.wait(), at::cat(shards)));
          EXPECT_TRUE(at::equal(b.wait(), whole));
          const int root = repeat % size();
          EXPECT_TRUE(at::equal(broadcast(*group, rank_values(group->rank(), {3}), root),
                                rank_values(root, {3})));
          barrier(*group);
        }
      },
      options());
  EXPECT_EQ(num_dropped_pending, 0);
}

TEST(SharedMemoryErrors, DisagreementIsTheSameErrorOnEveryRankAndTheGroupLives) {
  std::vector<std::string> texts(3);
  run_ranks(3, [&](const auto& group) {
    const at::Tensor x = at::ones({4, group->rank() == 2 ? 5 : 3});
    try {
      (void)reduce_scatter(*group, x);
    } catch (const c10::ValueError& error) {
      texts[static_cast<std::size_t>(group->rank())] = error.what_without_backtrace();
    }
    EXPECT_EQ(all_reduce(*group, at::ones({2})).sum().template item<float>(), 6);
  });
  EXPECT_NE(texts[0].find("ranks 0 and 2"), std::string::npos) << texts[0];
  EXPECT_NE(texts[0].find("3 and 5"), std::string::npos) << texts[0];
  EXPECT_EQ(texts[0], texts[1]);
  EXPECT_EQ(texts[0], texts[2]);
}

TEST(SharedMemoryErrors, ALostRankIsNamedAndTheGroupRefusesFurtherCalls) {
  run_ranks(3, [&](const auto& group) {
    if (group->rank() == 1) return;  // leaves
    for (int attempt = 0; attempt < 2; ++attempt) {
      try {
        (void)all_reduce(*group, at::ones({2}));
        ADD_FAILURE() << "no error";
      } catch (const c10::DistBackendError& error) {
        EXPECT_NE(std::string(error.what_without_backtrace()).find("lost rank 1"),
                  std::string::npos)
            << error.what_without_backtrace();
      }
    }
  });
}

TEST(NetworkErrors, AGroupThatLostAPeerRefusesFurtherCalls) {
  run_ranks(2,
            [&](const auto& group) {
              barrier(*group);
              if (group->rank() == 1) return;  // leaves
              for (int attempt = 0; attempt < 2; ++attempt) {
                try {
                  (void)reduce_scatter(*group, at::ones({4, 2}));
                  ADD_FAILURE() << "no error";
                } catch (const c10::DistBackendError& error) {
                  const std::string text = error.what_without_backtrace();
                  EXPECT_NE(text.find("reduce_scatter: group"), std::string::npos) << text;
                  EXPECT_EQ(text.find("unusable") != std::string::npos, attempt == 1) << text;
                }
              }
            },
            {std::chrono::seconds(2), false});
}

TEST(SharedMemoryErrors, ASilentRankEndsTheWaitWithinTheTimeOut) {
  std::atomic<bool> waited = false;
  run_ranks(2,
            [&](const auto& group) {
              if (group->rank() == 1) {
                while (!waited) std::this_thread::yield();
                return;
              }
              EXPECT_THROW((void)all_reduce(*group, at::ones({2})), c10::DistBackendError);
              waited = true;
            },
            {std::chrono::milliseconds(300), true});
}

TEST(SharedMemoryErrors, TooManyInFlight) {
  run_ranks(2, [&](const auto& group) {
    std::vector<Pending<at::Tensor>> started;
    for (int i = 0; i < SharedMemory::kInFlight; ++i)
      started.push_back(start_all_reduce(*group, at::ones({2})));
    EXPECT_THROW((void)start_all_reduce(*group, at::ones({2})), c10::ValueError);
    for (auto& pending : started) EXPECT_EQ(pending.wait().sum().template item<float>(), 4);
  });
}

TEST(SharedMemoryErrors, ALongLivedOperationHoldsUpNobodyButNotForEver) {
  run_ranks(2, [&](const auto& group) {
    auto old = start_all_gather(*group, rank_values(group->rank(), {3}));
    for (int i = 1; i < SharedMemory::kEntries; ++i)
      EXPECT_EQ(all_reduce(*group, at::ones({2})).sum().template item<float>(), 4);
    EXPECT_THROW((void)all_reduce(*group, at::ones({2})), c10::ValueError);
    EXPECT_TRUE(at::equal(old.wait(), at::cat({rank_values(0, {3}), rank_values(1, {3})})));
    EXPECT_EQ(all_reduce(*group, at::ones({2})).sum().template item<float>(), 4);
  });
}

TEST_P(Collectives, Texts) {
  const auto text_of = [](int rank) {
    return std::string(static_cast<std::size_t>(rank) * 3, 'a') + "\n";
  };
  run_ranks(
      size(),
      [&](const auto& group) {
        const bool is_last = group->rank() == size() - 1;
        const auto texts = gather_texts(*group, is_last ? "" : text_of(group->rank()));
        for (int rank = 0; rank < size(); ++rank)
          EXPECT_EQ(texts[static_cast<std::size_t>(rank)], rank == size() - 1 ? "" : text_of(rank));
        EXPECT_EQ(broadcast_text(*group, text_of(group->rank()), size() - 1), text_of(size() - 1));
        EXPECT_EQ(broadcast_text(*group, is_last ? "" : "not mine", size() - 1), "");
      },
      options());
}

TEST(SplitRows, FirstRanksHaveOneMore) {
  EXPECT_EQ(split_rows(7, 3), (std::vector<std::int64_t>{3, 2, 2}));
  EXPECT_EQ(split_rows(0, 2), (std::vector<std::int64_t>{0, 0}));
}

}  // namespace
}  // namespace braid
