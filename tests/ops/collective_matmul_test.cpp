// Collective matmuls in every mode against the plain ops: shapes, dtypes,
// uneven rows, strides, bit-exact integers.
#include "braid/ops/collective_matmul.h"

#include <gtest/gtest.h>

#include <thread>

#include "braid/comm/collectives.h"
#include "braid/core/trace.h"
#include "braid/ops/reference.h"
#include "tests/support/ranks.h"

namespace braid {
namespace {

using test::rank_integers;
using test::rank_values;
using test::run_ranks;

struct Case {
  const char* name;
  int size;
  MatmulOptions options;
  bool shared_memory;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name << " on " << c.size; }

std::vector<Case> cases() {
  std::vector<Case> result;
  for (const int size : {1, 2, 3, 4}) {
    for (const bool memory : {true, false}) {
      if (size == 1 && !memory) continue;
      result.push_back({"serial", size, {Mode::serial}, memory});
      result.push_back({"chunked 2", size, {Mode::chunked, 2}, memory});
      result.push_back({"chunked 5", size, {Mode::chunked, 5}, memory});
    }
    result.push_back({"fused", size, {Mode::fused}, true});
    if (size > 1) {
      result.push_back({"ring", size, {.mode = Mode::fused, .ring = true}, true});
      for (const auto mode : {Mode::serial, Mode::chunked, Mode::fused})
        for (const bool native : {false, true})
          result.push_back(
              {native ? "native" : "through f32", size, {.mode = mode, .native = native}, true});
    }
    result.push_back({"auto", size, {Mode::automatic}, true});
  }
  return result;
}

class CollectiveMatmul : public testing::TestWithParam<Case> {
 protected:
  void run(const std::function<void(const Group&)>& fn) const {
    run_ranks(GetParam().size, [&](const auto& group) { fn(*group); },
              {std::chrono::seconds(30), GetParam().shared_memory});
  }
  const MatmulOptions& options() const { return GetParam().options; }
};
INSTANTIATE_TEST_SUITE_P(Modes, CollectiveMatmul, testing::ValuesIn(cases()));

/// Relative to the largest value: a few roundings of the dtype.
void expect_close(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  ASSERT_EQ(actual.scalar_type(), expected.scalar_type()) << what;
  if (actual.numel() == 0) return;
  const double unit = expected.scalar_type() == at::kBFloat16 ? 4e-3
                      : expected.scalar_type() == at::kHalf   ? 5e-4
                                                              : 1e-6;
  const double scale = expected.abs().max().item<double>() + 1e-30;
  const double error =
      (actual.to(at::kDouble) - expected.to(at::kDouble)).abs().max().item<double>();
  EXPECT_LE(error, 3 * unit * scale) << what;
}

const std::vector<at::ScalarType> kDtypes{at::kFloat, at::kBFloat16, at::kHalf, at::kDouble};

TEST_P(CollectiveMatmul, AllGatherMatmul) {
  run([&](const Group& group) {
    for (const auto dtype : kDtypes) {
      for (const auto& [base, n, k] : std::vector<std::array<std::int64_t, 3>>{
               {5, 7, 9}, {1, 1, 1}, {64, 33, 20}, {0, 4, 3}}) {
        const std::string what =
            fmt::format("base {} n {} k {} {}", base, n, k, c10::toString(dtype));
        // Uneven: rank r has base + r rows, rank 1 none when there are three.
        const std::int64_t rows = base == 0                                ? 0
                                  : group.size() == 3 && group.rank() == 1 ? 0
                                                                           : base + group.rank();
        const at::Tensor x = rank_values(group.rank(), {rows, k}, dtype);
        const at::Tensor w = rank_values(group.rank() + 10, {n, k}, dtype);
        const at::Tensor b = rank_values(group.rank() + 20, {n}, dtype);
        expect_close(all_gather_matmul(group, x, w, {}, options()),
                     reference::all_gather_matmul(group, x, w), what);
        const auto v2 = all_gather_matmul_v2(group, x, w, b, options());
        expect_close(v2.y, reference::all_gather_matmul(group, x, w, b), what + " v2");
        EXPECT_TRUE(at::equal(v2.x_full, all_gather(group, x))) << what;
        // Weight stored the other way round, strided input.
        const at::Tensor wt = w.t().contiguous().t(), xt = x.t().contiguous().t();
        expect_close(all_gather_matmul(group, xt, wt, b, options()),
                     reference::all_gather_matmul(group, x, w, b), what + " strided");
      }
    }
  });
}

TEST_P(CollectiveMatmul, Reductions) {
  run([&](const Group& group) {
    for (const auto dtype : kDtypes) {
      for (const auto& [m, n, k] : std::vector<std::array<std::int64_t, 3>>{
               {13, 7, 9}, {1, 1, 1}, {128, 33, 20}, {0, 4, 3}, {3, 5, 1}}) {
        const std::string what = fmt::format("m {} n {} k {} {}", m, n, k, c10::toString(dtype));
        const at::Tensor x = rank_values(group.rank(), {m, k}, dtype),
                         w = rank_values(group.rank() + 10, {n, k}, dtype);
        const at::Tensor b = rank_values(99, {n}, dtype);
        expect_close(matmul_reduce_scatter(group, x, w, {}, options()),
                     reference::matmul_reduce_scatter(group, x, w), what + " reduce_scatter");
        expect_close(matmul_all_reduce(group, x, w, {}, options()),
                     reference::matmul_all_reduce(group, x, w), what + " all_reduce");
        const at::Tensor wt = w.t().contiguous().t(), xt = x.t().contiguous().t();
        auto scattered = start_matmul_reduce_scatter(group, xt, wt, b, options());
        auto reduced = start_matmul_all_reduce(group, xt, wt, b, options());
        expect_close(scattered.wait(), reference::matmul_reduce_scatter(group, x, w, b),
                     what + " reduce_scatter, bias");
        expect_close(reduced.wait(), reference::matmul_all_reduce(group, x, w, b),
                     what + " all_reduce, bias");
        const at::Tensor expanded = at::full({1, 1}, group.rank() + 1.0, dtype).expand({m, k});
        expect_close(matmul_all_reduce(group, expanded, w, {}, options()),
                     reference::matmul_all_reduce(group, expanded, w), what + " expanded");
      }
    }
  });
}

TEST_P(CollectiveMatmul, IntegersMatchToTheBit) {
  run([&](const Group& group) {
    const at::Tensor x = rank_integers(group.rank(), {40, 24}),
                     w = rank_integers(group.rank() + 5, {16, 24});
    EXPECT_TRUE(at::equal(all_gather_matmul(group, x, w, {}, options()),
                          reference::all_gather_matmul(group, x, w)));
    EXPECT_TRUE(at::equal(matmul_reduce_scatter(group, x, w, {}, options()),
                          reference::matmul_reduce_scatter(group, x, w)));
    const at::Tensor y = matmul_all_reduce(group, x, w, {}, options());
    const at::Tensor kept = y.clone();
    EXPECT_TRUE(at::equal(y, reference::matmul_all_reduce(group, x, w)));
    for (int i = 0; i < 9; ++i) (void)matmul_all_reduce(group, x + i, w, {}, options());
    EXPECT_TRUE(at::equal(y, kept)) << "a result aliases a slot";
  });
}

TEST_P(CollectiveMatmul, LeadingDimensions) {
  run([&](const Group& group) {
    const at::Tensor x = rank_values(group.rank(), {6, 2, 8}),
                     w = rank_values(group.rank() + 10, {5, 8});
    expect_close(all_gather_matmul(group, x, w, {}, options()),
                 reference::all_gather_matmul(group, x, w), "all_gather");
    const auto v2 = all_gather_matmul_v2(group, x, w, {}, options());
    EXPECT_EQ(v2.x_full.sizes(), (std::vector<std::int64_t>{6 * group.size(), 2, 8}));
    expect_close(matmul_reduce_scatter(group, x, w, {}, options()),
                 reference::matmul_reduce_scatter(group, x, w), "reduce_scatter");
    expect_close(matmul_all_reduce(group, x, w, {}, options()),
                 reference::matmul_all_reduce(group, x, w), "all_reduce");
  });
}

/// Columns of a whole int8 weight that differ by rank in number, so that groups are cut.
TEST_P(CollectiveMatmul, Int8Weights) {
  run([&](const Group& group) {
    const std::int64_t m = 21, n = 33, k = 61;
    std::vector<std::int64_t> shares = split_rows(k, group.size());
    shares[0] += 7;
    shares.back() -= 7;
    const auto own = shares[static_cast<std::size_t>(group.rank())];
    const auto begin = first_row(shares, group.rank());
    for (const auto granularity : {Granularity::tensor, Granularity::channel, Granularity::group}) {
      for (const bool symmetric : {true, false}) {
        const Int8Weight whole =
            quantize_weight(rank_values(3, {n, k}), {granularity, /*group_size=*/9, symmetric});
        const Int8Weight shard = whole.columns(begin, own);
        for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
          const std::string what =
              fmt::format("granularity {} symmetric {} {}", static_cast<int>(granularity),
                          symmetric, c10::toString(dtype));
          const at::Tensor x_whole = rank_values(1, {m, k}, dtype), b = rank_values(9, {n}, dtype);
          const at::Tensor x = x_whole.narrow(1, begin, own);
          const at::Tensor expected =
              at::linear(x_whole.to(at::kDouble), whole.dequantize(at::kDouble));
          expect_close(matmul_all_reduce(group, x, shard, {}, options()), expected.to(dtype), what);
          expect_close(matmul_all_reduce(group, x, shard, b, options()),
                       (expected + b.to(at::kDouble)).to(dtype), what + " bias");
        }
      }
    }
  });
}

TEST_P(CollectiveMatmul, WeightGradients) {
  run([&](const Group& group) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      const std::int64_t rows = 5 + 2 * group.rank(), k = 6, n = 4;
      std::vector<std::int64_t> all;
      for (int r = 0; r < group.size(); ++r) all.push_back(5 + 2 * r);
      const std::int64_t m = std::accumulate(all.begin(), all.end(), std::int64_t{0});
      const at::Tensor x = rank_values(group.rank(), {rows, k}, dtype),
                       dy = rank_values(group.rank() + 3, {m, n}, dtype);
      const at::Tensor expected = reference::all_gather_wgrad(group, dy, x).to(at::kFloat);
      at::Tensor dw = at::ones({n, k});
      all_gather_wgrad(group, dy, x, dw, true, options());
      expect_close(dw, expected + 1, "accumulated");
      all_gather_wgrad(group, dy, x, dw, false, options(), all);
      expect_close(dw, expected, "overwritten");

      // Row-parallel backward: dy sharded by rows, x whole.
      const at::Tensor dy_shard = rank_values(group.rank(), {rows, n}, dtype),
                       w = rank_values(group.rank() + 7, {n, k}, dtype);
      const at::Tensor x_whole = rank_values(group.rank() + 9, {m, k}, dtype),
                       dy_full = all_gather(group, dy_shard);
      at::Tensor dw2 = at::ones({n, k}), db = at::ones({n}, dtype);
      const at::Tensor dx =
          all_gather_matmul_backward(group, dy_shard, w, x_whole, true, dw2, true, db, options());
      expect_close(dx, reference::all_gather_matmul(group, dy_shard, w.t()), "dx");
      expect_close(dw2, dy_full.to(at::kDouble).t().mm(x_whole.to(at::kDouble)).to(at::kFloat) + 1,
                   "dw");
      expect_close(db, (dy_full.to(at::kDouble).sum(0) + 1).to(dtype), "db");
      EXPECT_FALSE(
          all_gather_matmul_backward(group, dy_shard, w, x_whole, false, {}, false, {}, options())
              .defined());
    }
  });
  EXPECT_EQ(num_dropped_pending, 0);
}

TEST(CollectiveMatmulErrors, CallersMistakesComeBeforeAnyMessage) {
  run_ranks(2, [&](const auto& group) {
    if (group->rank() == 1) return;  // alone: a message would wait
    const at::Tensor x = at::ones({4, 3});
    EXPECT_THROW((void)all_gather_matmul(*group, x, at::ones({5, 4})), c10::ValueError);
    EXPECT_THROW((void)matmul_all_reduce(*group, x, at::ones({5, 3}, at::kBFloat16)),
                 c10::ValueError);
    EXPECT_THROW((void)matmul_reduce_scatter(*group, x, at::ones({5, 3}), at::ones({4})),
                 c10::ValueError);
    EXPECT_THROW((void)matmul_all_reduce(*group, at::ones({3}), at::ones({5, 3})), c10::ValueError);
    EXPECT_THROW((void)matmul_all_reduce(*group, x, at::ones({5, 3}), {}, {Mode::chunked, 0}),
                 c10::ValueError);
    EXPECT_THROW((void)matmul_all_reduce(*group, x, at::ones({5, 3}), at::ones({5}, at::kHalf)),
                 c10::ValueError);
    EXPECT_THROW((void)matmul_reduce_scatter(*group, x, at::ones({5, 3}), {}, {}, {1, 2}),
                 c10::ValueError);
    EXPECT_THROW((void)matmul_reduce_scatter(*group, x, at::ones({5, 3}), {}, {}, {4}),
                 c10::ValueError);
    EXPECT_THROW((void)matmul_reduce_scatter(*group, x, at::ones({5, 3}), {}, {}, {5, -1}),
                 c10::ValueError);
    const Int8Weight int8 = quantize_weight(at::ones({5, 3}));
    EXPECT_THROW((void)matmul_all_reduce(*group, at::ones({4, 2}), int8), c10::ValueError);
    EXPECT_THROW((void)matmul_all_reduce(*group, x.to(at::kDouble), int8), c10::ValueError);
  });
}

TEST(CollectiveMatmulErrors, DisagreementIsTheSameErrorOnEveryRank) {
  run_ranks(3, [&](const auto& group) {
    const std::int64_t n = group->rank() == 1 ? 6 : 5;
    try {
      (void)matmul_all_reduce(*group, at::ones({4, 3}), at::ones({n, 3}), {}, {Mode::fused});
      ADD_FAILURE() << "no error";
    } catch (const c10::ValueError& error) {
      EXPECT_NE(std::string(error.what()).find("ranks 0 and 1"), std::string::npos);
      EXPECT_NE(std::string(error.what()).find("5 and 6"), std::string::npos);
    }
    EXPECT_EQ(matmul_all_reduce(*group, at::ones({4, 3}), at::ones({5, 3}), {}, {Mode::fused})
                  .max()
                  .template item<float>(),
              9);
  });
}

struct Seen {
  std::vector<trace::Event> matmuls, waits;
  std::int64_t calls = 0;
};

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
