// Interleaved rounds between barriers.
#include "braid/comm/timing.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>

#include "braid/comm/collectives.h"

namespace braid {

at::Tensor time_interleaved(const Group& group, const std::vector<std::function<void()>>& ways,
                            int rounds, int calls) {
  const auto num = static_cast<std::int64_t>(ways.size());
  at::Tensor seconds = at::empty({num, rounds}, at::kDouble);
  std::vector<std::int64_t> order(ways.size());
  std::iota(order.begin(), order.end(), 0);
  std::mt19937 same_on_all_ranks(1);
  for (int round = 0; round < rounds; ++round) {
    std::shuffle(order.begin(), order.end(), same_on_all_ranks);
    for (const std::int64_t way : order) {
      barrier(group);
      const auto begin = std::chrono::steady_clock::now();
      for (int call = 0; call < calls; ++call) ways[static_cast<std::size_t>(way)]();
      const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
      seconds[way][round] = elapsed.count() / calls;
    }
  }
  return all_reduce(group, seconds, ReduceOp::max);
}

}  // namespace braid
