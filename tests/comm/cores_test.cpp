// The division of a host's cores among its ranks.
#include "braid/comm/cores.h"

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <functional>
#include <set>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace braid {
namespace {

/// Nodes with so many physical cores each, of two threads; threads and nodes are numbered in turn, as Linux does.
std::vector<Core> machine(const std::vector<int>& cores_of_nodes, int threads = 1) {
  std::vector<Core> cores;
  int number = 0;
  for (int thread = 0; thread < threads; ++thread)
    for (int core = 0; core < 64; ++core)
      for (int node = 0; node < static_cast<int>(cores_of_nodes.size()); ++node)
        if (core < cores_of_nodes[static_cast<std::size_t>(node)])
          cores.push_back({node, node, core, number++});
  return cores;
}

/// How many cores of each node each of the ranks has; all cores are given away once.
std::vector<std::vector<int>> division(const std::vector<Core>& cores, std::size_t sharers) {
  std::vector<std::vector<int>> counts;
  std::set<int> given;
  std::size_t num_given = 0;
  for (std::size_t rank = 0; rank < sharers; ++rank) {
    auto& of_rank = counts.emplace_back();
    for (const Core& core : share_of(cores, sharers, rank)) {
      of_rank.resize(std::max(of_rank.size(), static_cast<std::size_t>(core.node) + 1));
      ++of_rank[static_cast<std::size_t>(core.node)];
      given.insert(core.number);
      ++num_given;
    }
  }
  if (sharers <= cores.size()) {
    EXPECT_EQ(given.size(), cores.size());
    EXPECT_EQ(num_given, cores.size());
  }
  return counts;
}

using Division = std::vector<std::vector<int>>;

TEST(ShareOf, WithinANodeWhereItCostsLittle) {
  EXPECT_EQ(division(machine({4, 4}), 1), (Division{{4, 4}}));
  EXPECT_EQ(division(machine({4, 4}), 2), (Division{{4}, {0, 4}}));
  EXPECT_EQ(division(machine({4, 4}), 4), (Division{{2}, {2}, {0, 2}, {0, 2}}));
  // Cores that others were given: even shares would be 7 and 8, across the nodes.
  EXPECT_EQ(division(machine({6, 8}), 2), (Division{{6}, {0, 8}}));
  EXPECT_EQ(division(machine({8, 7}), 4), (Division{{4}, {4}, {0, 3}, {0, 4}}));
  // Five ranks on two nodes of ten: four each.
  EXPECT_EQ(division(machine({10, 10}), 5), (Division{{4}, {4}, {2, 2}, {0, 4}, {0, 4}}));
}

TEST(ShareOf, EvenWhereANodeWouldCostMore) {
  EXPECT_EQ(division(machine({6, 6}), 3), (Division{{4}, {2, 2}, {0, 4}}));
  EXPECT_EQ(division(machine({2, 12}), 2), (Division{{2, 5}, {0, 7}}));
}

TEST(ShareOf, FewerRanksThanNodesHaveWholeNodes) {
  EXPECT_EQ(division(machine({4, 4, 4, 4}), 2), (Division{{4, 4}, {0, 0, 4, 4}}));
}

TEST(ShareOf, MoreRanksThanCores) {
  EXPECT_EQ(division(machine({1, 1}), 4), (Division{{1}, {1}, {0, 1}, {0, 1}}));
}

TEST(ShareOf, ThreadsOfACoreStayTogether) {
  for (std::size_t rank : {0u, 1u, 2u, 3u}) {
    const auto share = share_of(machine({2, 2}, 2), 4, rank);
    ASSERT_EQ(share.size(), 2u);
    EXPECT_EQ(share[0].node, share[1].node);
    EXPECT_EQ(share[0].core, share[1].core);
    EXPECT_NE(share[0].number, share[1].number);
  }
}

std::vector<int> cores_of_this_thread() {
  cpu_set_t set;
  std::vector<int> cores;
  EXPECT_EQ(sched_getaffinity(0, sizeof set, &set), 0);
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  return cores;
}

struct Share {
  std::vector<int> cores;
  int threads = 0;
};

/// What share_cores gives each of `num_ranks` threads; `before` may bind a thread first.
std::vector<Share> shares(int num_ranks, const std::function<void(int rank)>& before = {}) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<Share> result(static_cast<std::size_t>(num_ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      if (before) before(rank);
      Place place;
      place.rank = rank;
      place.world_size = num_ranks;
      share_cores(place, *store);
      result[static_cast<std::size_t>(rank)] = {cores_of_this_thread(), at::get_num_threads()};
    });
  }
  for (auto& thread : threads) thread.join();
  return result;
}

void bind_to(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  EXPECT_EQ(sched_setaffinity(0, sizeof set, &set), 0);
}

TEST(ShareCores, RanksThatShareAMaskDivideIt) {
  const auto all = cores_of_this_thread();
  for (int num_ranks : {1, 2, 3}) {
    std::vector<int> together;
    for (const Share& share : shares(num_ranks)) {
      EXPECT_FALSE(share.cores.empty());
      EXPECT_EQ(share.threads, static_cast<int>(share.cores.size()));
      together.insert(together.end(), share.cores.begin(), share.cores.end());
    }
    if (static_cast<int>(all.size()) >= num_ranks) {
      EXPECT_THAT(together, testing::UnorderedElementsAreArray(all)) << num_ranks << " ranks";
    } else {
      EXPECT_THAT(all, testing::IsSupersetOf(std::set<int>(together.begin(), together.end())));
    }
  }
}

TEST(ShareCores, RanksBoundByTheirLauncherKeepTheirCores) {
  const auto all = cores_of_this_thread();
  if (all.size() < 2) GTEST_SKIP() << "one core";
  const auto bound = shares(2, [&](int rank) { bind_to(all[static_cast<std::size_t>(rank)]); });
  EXPECT_THAT(bound[0].cores, testing::ElementsAre(all[0]));
  EXPECT_THAT(bound[1].cores, testing::ElementsAre(all[1]));
}

TEST(ShareCores, MoreRanksThanCoresHaveOneEach) {
  const auto all = cores_of_this_thread();
  for (const Share& share : shares(2, [&](int) { bind_to(all[0]); })) {
    EXPECT_THAT(share.cores, testing::ElementsAre(all[0]));
    EXPECT_EQ(share.threads, 1);
  }
}

}  // namespace
}  // namespace braid
