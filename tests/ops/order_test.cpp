// The order of matmuls and communication, and what a late rank costs: read off the trace, with an injected delay.
#include <gtest/gtest.h>

#include <functional>
#include <mutex>
#include <thread>

#include "braid/comm/collectives.h"
#include "braid/core/trace.h"
#include "braid/ops/collective_matmul.h"
#include "tests/support/ranks.h"

namespace braid {
namespace {

using test::rank_values;
using test::run_ranks;

struct Seen {
  std::vector<trace::Event> matmuls, waits;
  std::int64_t calls = 0;
};

/// Of 4 ranks one comes 100 ms late: what the others wait for all in all, the most of them.
double waited_for_a_late_rank(const MatmulOptions& options) {
  std::mutex mutex;
  double most = 0;
  run_ranks(4, [&](const auto& group) {
    const at::Tensor x = rank_values(group->rank(), {64, 32}), w = rank_values(9, {16, 32});
    (void)matmul_all_reduce(*group, x, w, {}, options);
    barrier(*group);
    trace::keep_events(true);
    if (group->rank() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    (void)matmul_all_reduce(*group, x, w, {}, options);
    trace::keep_events(false);
    double waited = 0;
    for (const auto& event : trace::take_events())
      if (event.kind == trace::Kind::wait)
        waited += 1e-9 * static_cast<double>(event.end_ns - event.begin_ns);
    const std::lock_guard lock(mutex);
    if (group->rank() != 2) most = std::max(most, waited);
  });
  return most;
}

TEST(CollectiveMatmulOrder, ALateRankCostsTheOthersItsDelayOnce) {
  for (const bool ring : {false, true}) {
    const double waited = waited_for_a_late_rank({.mode = Mode::fused, .ring = ring});
    EXPECT_GT(waited, 0.05) << ring;
    EXPECT_LT(waited, 0.15) << ring;
  }
}

/// What rank 0 does in `call` while rank 1 comes 50 ms late.
Seen seen_beside_a_late_peer(const char* op, const std::function<void(const Group&)>& call) {
  Seen seen;
  run_ranks(2, [&](const auto& group) {
    (void)trace::take_totals();
    barrier(*group);
    trace::keep_events(group->rank() == 0);
    if (group->rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    call(*group);
    trace::keep_events(false);
    const auto totals = trace::take_totals();
    if (group->rank() != 0) return;
    seen.calls = totals.at(op).calls;
    for (const auto& event : trace::take_events()) {
      if (event.kind == trace::Kind::compute) seen.matmuls.push_back(event);
      if (event.kind == trace::Kind::wait) seen.waits.push_back(event);
    }
  });
  return seen;
}

TEST(CollectiveMatmulOrder, TheOwnTileIsMultipliedWhileAPeerIsAwaited) {
  const at::Tensor x = at::ones({64, 32}), w = at::ones({16, 32});
  for (const auto& [mode, num_matmuls] :
       {std::pair(Mode::fused, std::size_t{2}), std::pair(Mode::serial, std::size_t{1})}) {
    const Seen seen = seen_beside_a_late_peer("all_gather_matmul", [&](const Group& group) {
      (void)all_gather_matmul(group, x, w, {}, {mode}, {64, 64});
    });
    EXPECT_EQ(seen.calls, 1);
    ASSERT_EQ(seen.matmuls.size(), num_matmuls);
    ASSERT_FALSE(seen.waits.empty());
    const bool is_first = seen.matmuls[0].end_ns <= seen.waits[0].begin_ns;
    EXPECT_EQ(is_first, mode == Mode::fused);
  }
}

/// Every pass is as many matmuls as it has tiles: backward's, too.
TEST(CollectiveMatmulOrder, EveryPassIsCutIntoItsTiles) {
  const at::Tensor x = at::ones({64, 32}), w = at::ones({16, 32}), dy = at::ones({128, 16});
  struct Pass {
    const char* op;
    std::function<void(const Group&, MatmulOptions)> run;
    std::size_t of_a_tile;
  };
  const std::vector<Pass> passes{
      {"all_gather_matmul",
       [&](const Group& group, MatmulOptions options) {
         (void)all_gather_matmul(group, x, w, {}, options, {64, 64});
       },
       1},
      {"matmul_reduce_scatter",
       [&](const Group& group, MatmulOptions options) {
         (void)matmul_reduce_scatter(group, x, w, {}, options);
       },
       1},
      {"all_gather_wgrad",
       [&](const Group& group, MatmulOptions options) {
         all_gather_wgrad(group, dy, x, at::empty({16, 32}), false, options, {64, 64});
       },
       1},
      {"all_gather_matmul_backward",
       [&](const Group& group, MatmulOptions options) {
         (void)all_gather_matmul_backward(group, dy.narrow(0, 0, 64), w, at::ones({128, 32}), true,
                                          at::empty({16, 32}), false, {}, options, {64, 64});
       },
       2}};
  for (const Pass& pass : passes) {
    for (const auto& [options, tiles] :
         {std::pair(MatmulOptions{Mode::serial}, std::size_t{1}),
          std::pair(MatmulOptions{Mode::chunked, 4}, std::size_t{8}),  // of each rank's rows
          std::pair(MatmulOptions{Mode::fused}, std::size_t{2})}) {
      const Seen seen = seen_beside_a_late_peer(
          pass.op, [&, options = options](const Group& group) { pass.run(group, options); });
      EXPECT_EQ(seen.calls, 1) << pass.op;
      EXPECT_EQ(seen.matmuls.size(), tiles * pass.of_a_tile) << pass.op;
    }
  }
}

TEST(CollectiveMatmulOrder, EachChunkIsOneMatmulAndOneCollective) {
  const at::Tensor x = at::ones({64, 32}), w = at::ones({16, 32});
  const Seen seen = seen_beside_a_late_peer("matmul_all_reduce", [&](const Group& group) {
    (void)matmul_all_reduce(group, x, w, {}, {Mode::chunked, 4});
  });
  EXPECT_EQ(seen.calls, 1);
  EXPECT_EQ(seen.matmuls.size(), 4);
  ASSERT_FALSE(seen.waits.empty());
  EXPECT_LE(seen.matmuls[1].end_ns, seen.waits[0].begin_ns);  // two chunks are in flight
}

}  // namespace
}  // namespace braid
