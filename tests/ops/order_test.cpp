// The order of matmuls and communication, and what a late rank costs: read off the trace, with an injected delay.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <mutex>
#include <string>
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
  std::string
      order;  // first letters of the steps but waits: publish, fetch, reduce, and of any product m
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

/// What rank 0 does in `call` while the last rank comes 50 ms late.
Seen seen_beside_a_late_peer(const char* op, const std::function<void(const Group&)>& call,
                             int size = 2, const test::HostNumbers& hosts = {},
                             std::chrono::milliseconds delay = std::chrono::milliseconds(50)) {
  Seen seen;
  const auto see = [&](const auto& group) {
    (void)trace::take_totals();
    barrier(*group);
    trace::keep_events(group->rank() == 0);
    if (group->rank() == size - 1) std::this_thread::sleep_for(delay);
    call(*group);
    trace::keep_events(false);
    const auto totals = trace::take_totals();
    if (group->rank() != 0) return;
    seen.calls = totals.at(op).calls;
    for (const auto& event : trace::take_events()) {
      EXPECT_STREQ(event.op, op);
      if (event.kind == trace::Kind::compute) seen.matmuls.push_back(event);
      if (event.kind == trace::Kind::wait) seen.waits.push_back(event);
      if (event.kind == trace::Kind::compute) seen.order += 'm';
      if (event.kind == trace::Kind::copy) seen.order += event.what[0];
    }
  };
  run_ranks(size, see, test::on_hosts(hosts));
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

/// One call of each pass on any number of ranks: 64 rows a shard of what is gathered, 96 of what is reduced.
struct Pass {
  const char* op;
  std::function<void(const Group&, MatmulOptions)> run;
  bool reduces = false;
  int matmuls_of_a_tile = 1;
};

std::vector<Pass> passes() {
  const at::Tensor shard = at::ones({64, 32}), x = at::ones({96, 32}), w = at::ones({16, 32});
  const auto rows = [](const Group& group) {
    return std::vector<std::int64_t>(static_cast<std::size_t>(group.size()), 64);
  };
  const auto whole = [](const Group& group, std::int64_t n) {
    return at::ones({64 * group.size(), n});
  };
  return {{"all_gather_matmul",
           [=](const Group& group, MatmulOptions options) {
             (void)all_gather_matmul(group, shard, w, {}, options, rows(group));
           }},
          {"all_gather_wgrad",
           [=](const Group& group, MatmulOptions options) {
             all_gather_wgrad(group, whole(group, 16), shard, at::empty({16, 32}), false, options,
                              rows(group));
           }},
          {"all_gather_matmul_backward",
           [=](const Group& group, MatmulOptions options) {
             (void)all_gather_matmul_backward(group, shard.narrow(1, 0, 16), w, whole(group, 32),
                                              true, at::empty({16, 32}), false, {}, options,
                                              rows(group));
           },
           false, 2},
          {"matmul_reduce_scatter",
           [=](const Group& group, MatmulOptions options) {
             (void)matmul_reduce_scatter(group, x, w, {}, options);
           },
           true},
          {"matmul_all_reduce",
           [=](const Group& group, MatmulOptions options) {
             (void)matmul_all_reduce(group, x, w, {}, options);
           },
           true},
          {"matmul_all_reduce_int8",
           [=](const Group& group, MatmulOptions options) {
             (void)matmul_all_reduce(group, x, quantize_weight(w), {}, options);
           },
           true}};
}

std::string times(int n, const std::string& text) {
  std::string result;
  for (int i = 0; i < n; ++i) result += text;
  return result;
}

/// The steps of a pass inside a host: each collective is one publish or reduce, each tile one m.
std::string expected_order(const Pass& pass, int size, const MatmulOptions& options) {
  const int chunks = options.mode == Mode::chunked ? options.num_chunks : 1;
  const bool scatters = std::string(pass.op) == "matmul_reduce_scatter";
  const std::string tile = times(pass.matmuls_of_a_tile, "m"), tiles = times(size, tile);
  const std::string fetches = times(size, "f");
  std::string order;
  if (options.mode == Mode::fused && !pass.reduces) {
    order = fmt::format("p{}", tiles);  // the peers' rows are read where they are
  } else if (options.mode == Mode::fused) {
    // Partials are summed where they lie: by the own matmul, from three ranks on before it, unless a ring did.
    order = fmt::format("{}{}m{}", times(size - 1, "m"), size > 2 && !options.ring ? "r" : "",
                        scatters ? "f" : fetches);
  } else if (!pass.reduces) {
    order = "p";
    for (int chunk = 0; chunk < chunks;
         ++chunk)  // the next one is published before one is multiplied
      order +=
          fmt::format("{}{}{}", chunk + 1 < chunks ? "p" : "", fetches, chunks == 1 ? tile : tiles);
  } else {
    // A chunk is reduced once two more are multiplied. It was multiplied into the slot: nothing is published.
    const bool cut = scatters && chunks > 1;
    for (int step = 0; step < chunks + 2; ++step)
      order += fmt::format("{}{}",
                           step >= chunks ? ""
                           : cut          ? tiles
                                          : tile,
                           step < 2 ? ""
                           : cut    ? "rf"
                                    : "r");
  }
  return order;
}

/// Every pass, backward's too, is so many matmuls as it has tiles and so many collectives as it has chunks, in an order
/// that overlaps them.
TEST(CollectiveMatmulOrder, EveryPassIsCutIntoItsTilesAndCollectives) {
  constexpr int kChunks = 4;
  constexpr std::chrono::milliseconds kDelay{10};
  for (const int size : {2, 3}) {
    for (const Pass& pass : passes()) {
      for (const MatmulOptions& options :
           {MatmulOptions{Mode::serial}, MatmulOptions{Mode::chunked, kChunks},
            MatmulOptions{Mode::fused}, MatmulOptions{.mode = Mode::fused, .ring = true}}) {
        const auto run = [&](const Group& group) { pass.run(group, options); };
        const std::string what = fmt::format("{} on {}, mode {}, ring {}", pass.op, size,
                                             static_cast<int>(options.mode), options.ring);
        const Seen seen = seen_beside_a_late_peer(pass.op, run, size, {}, kDelay);
        EXPECT_EQ(seen.calls, 1) << what;
        EXPECT_EQ(seen.order, expected_order(pass, size, options)) << what;
      }
    }
  }
}

/// Between hosts nothing is waited for while there is something to multiply: own rows of what is gathered, all tiles
/// of what is reduced.
TEST(CollectiveMatmulOrder, TilesForOtherHostsAreMadeBesideALatePeer) {
  for (const auto& [size, num_tiles] :
       {std::pair(2, 4), std::pair(3, 4), std::pair(2, 1), std::pair(3, 1)}) {
    const MatmulOptions options{num_tiles == 1 ? Mode::fused : Mode::chunked, num_tiles};
    for (const Pass& pass : passes()) {
      const std::string what = fmt::format("{} on {} in {}", pass.op, size, num_tiles);
      const Seen seen = seen_beside_a_late_peer(
          pass.op, [&](const Group& group) { pass.run(group, options); }, size, test::apart(size));
      EXPECT_EQ(seen.calls, 1) << what;
      const int tiles = pass.reduces ? size * num_tiles : 1 + (size - 1) * num_tiles;
      ASSERT_EQ(seen.matmuls.size(), pass.matmuls_of_a_tile * tiles) << what;
      ASSERT_FALSE(seen.waits.empty()) << what;
      const trace::Event& last =
          pass.reduces ? seen.matmuls.back()
                       : seen.matmuls[static_cast<std::size_t>(pass.matmuls_of_a_tile - 1)];
      EXPECT_LE(last.end_ns, seen.waits[0].begin_ns) << what;
      EXPECT_GE(seen.waits[0].end_ns - seen.waits[0].begin_ns, 20'000'000) << what;
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
