// Collective matmuls in every mode against the plain ops: shapes, dtypes,
// uneven rows, strides, bit-exact integers.
#include "braid/ops/collective_matmul.h"

#include <gtest/gtest.h>

#include "braid/comm/collectives.h"
#include "braid/comm/shared_memory.h"
#include "braid/ops/reference.h"
#include "tests/support/poison.h"
#include "tests/support/ranks.h"

namespace braid {
namespace {

using test::poison;
using test::poisoned;
using test::rank_integers;
using test::rank_values;
using test::run_ranks;

struct Case {
  const char* name;
  int size;
  MatmulOptions options;
  test::HostNumbers hosts = {};
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name << " by " << c.size << test::name_of(c.hosts);
}

std::vector<Case> cases() {
  std::vector<Case> result;
  for (const int size : {1, 2, 3, 4}) {
    for (const auto& hosts : {test::HostNumbers(), test::apart(size)}) {
      if (size == 1 && !hosts.empty()) continue;
      result.push_back({"serial", size, {Mode::serial}, hosts});
      result.push_back({"chunked 2", size, {Mode::chunked, 2}, hosts});
      result.push_back({"chunked 5", size, {Mode::chunked, 5}, hosts});
      result.push_back({"fused", size, {Mode::fused}, hosts});
    }
    if (size > 1) result.push_back({"ring", size, {.mode = Mode::fused, .ring = true}});
    if (size == 2 || size == 3) {
      for (const auto mode : {Mode::serial, Mode::chunked, Mode::fused})
        for (const bool native : {false, true})
          result.push_back(
              {native ? "native" : "through f32", size, {.mode = mode, .native = native}});
      result.push_back({"auto", size, {Mode::automatic}});
    }
  }
  for (const int size : {5, 8}) {
    result.push_back({"serial", size, {Mode::serial}});
    result.push_back({"fused", size, {Mode::fused}});
    result.push_back({"ring", size, {.mode = Mode::fused, .ring = true}});
    result.push_back({"chunked 2", size, {Mode::chunked, 2}, test::apart(size)});
  }
  for (const auto& hosts :
       std::vector<test::HostNumbers>{{0, 1, 1}, {0, 1, 0, 0}, {0, 1, 2, 1, 0}}) {
    const int size = static_cast<int>(hosts.size());
    result.push_back({"serial", size, {Mode::serial}, hosts});
    result.push_back({"fused", size, {Mode::fused}, hosts});
    result.push_back({"no ring", size, {.mode = Mode::fused, .ring = true}, hosts});
    for (const bool native : {false, true})
      result.push_back({native ? "native 3" : "through f32 3",
                        size,
                        {.mode = Mode::chunked, .num_chunks = 3, .native = native},
                        hosts});
  }
  result.push_back({"auto", 2, {Mode::automatic}, {0, 1}});
  return result;
}

/// Slots and new tensors hold NaN, so that an element that nobody wrote shows.
class CollectiveMatmul : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override { at::globalContext().setDeterministicAlgorithms(true, true); }
  void TearDown() override { at::globalContext().setDeterministicAlgorithms(false, false); }
  void run(const std::function<void(const Group&)>& fn) const {
    run_ranks(
        GetParam().size,
        [&](const auto& group) {
          ASSERT_TRUE(at::empty({3}).isnan().all().template item<bool>());
          poison(*group);
          fn(*group);
        },
        test::on_hosts(GetParam().hosts));
  }
  const MatmulOptions& options() const { return GetParam().options; }
};
INSTANTIATE_TEST_SUITE_P(Modes, CollectiveMatmul, testing::ValuesIn(cases()));

/// Relative to the largest value: the error, in units of a few roundings of the dtype.
double error_of(const at::Tensor& actual, const at::Tensor& expected) {
  const double unit = expected.scalar_type() == at::kBFloat16 ? 4e-3
                      : expected.scalar_type() == at::kHalf   ? 5e-4
                                                              : 1e-6;
  const double scale = expected.abs().max().item<double>() + 1e-30;
  const double error =
      (actual.to(at::kDouble) - expected.to(at::kDouble)).abs().max().item<double>();
  return error / (3 * unit * scale);
}
void expect_close(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  ASSERT_EQ(actual.scalar_type(), expected.scalar_type()) << what;
  if (actual.numel() == 0) return;
  EXPECT_LE(error_of(actual, expected), 1) << what;
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
        expect_close(all_gather_matmul(poisoned(group), x, w, {}, options()),
                     reference::all_gather_matmul(group, x, w), what);
        const auto v2 = all_gather_matmul_v2(poisoned(group), x, w, b, options());
        expect_close(v2.y, reference::all_gather_matmul(group, x, w, b), what + " v2");
        EXPECT_TRUE(at::equal(v2.x_full, all_gather(group, x))) << what;
        // Weight stored the other way round, strided input.
        const at::Tensor wt = w.t().contiguous().t(), xt = x.t().contiguous().t();
        expect_close(all_gather_matmul(poisoned(group), xt, wt, b, options()),
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
        expect_close(matmul_reduce_scatter(poisoned(group), x, w, {}, options()),
                     reference::matmul_reduce_scatter(group, x, w), what + " reduce_scatter");
        expect_close(matmul_all_reduce(poisoned(group), x, w, {}, options()),
                     reference::matmul_all_reduce(group, x, w), what + " all_reduce");
        const at::Tensor wt = w.t().contiguous().t(), xt = x.t().contiguous().t();
        auto scattered = start_matmul_reduce_scatter(poisoned(group), xt, wt, b, options());
        auto reduced = start_matmul_all_reduce(poisoned(group), xt, wt, b, options());
        expect_close(scattered.wait(), reference::matmul_reduce_scatter(group, x, w, b),
                     what + " reduce_scatter, bias");
        expect_close(reduced.wait(), reference::matmul_all_reduce(group, x, w, b),
                     what + " all_reduce, bias");
        const at::Tensor expanded = at::full({1, 1}, group.rank() + 1.0, dtype).expand({m, k});
        // Half partials of several ranks are rounded; of one sign, so that their sum is as large.
        expect_close(matmul_all_reduce(poisoned(group), expanded, w.abs(), {}, options()),
                     reference::matmul_all_reduce(group, expanded, w.abs()), what + " expanded");
      }
    }
  });
}

/// A negative control: rows that come to the wrong rank, or in another order, are seen.
TEST_P(CollectiveMatmul, RowsInAWrongOrderAreSeen) {
  if (GetParam().size == 1) return;
  run([&](const Group& group) {
    const std::int64_t t = 4 * group.size();
    const at::Tensor x = rank_values(group.rank(), {t, 9}),
                     w = rank_values(group.rank() + 10, {7, 9});
    const at::Tensor expected = reference::matmul_reduce_scatter(group, x, w);
    const at::Tensor rolled =
        matmul_reduce_scatter(poisoned(group), x.roll(1, 0), w, {}, options());
    EXPECT_GT(error_of(rolled, expected), 100);
    const at::Tensor shard = x.narrow(0, 0, 4);
    const at::Tensor gathered = all_gather_matmul(poisoned(group), shard, w, {}, options());
    EXPECT_GT(error_of(gathered.roll(4, 0), reference::all_gather_matmul(group, shard, w)), 100);
  });
}

/// Offset, expanded and transposed inputs, and rows that each rank has another number of.
TEST_P(CollectiveMatmul, InputsInAnyLayoutAndAnySplitOfRows) {
  run([&](const Group& group) {
    const std::int64_t t = 23, n = 6, k = 8;
    const at::Tensor large = rank_values(group.rank(), {t + 5, 2 * k});
    std::vector<std::int64_t> split(static_cast<std::size_t>(group.size()), 0);
    split.back() = t;
    if (group.size() > 2) split[1] = 5, split.back() -= 5;
    const std::vector<at::Tensor> inputs{
        large.narrow(0, 3, t).narrow(1, 5, k), large.narrow(0, 1, t).slice(1, 1, 2 * k, 2),
        rank_values(group.rank(), {k, t}).t(), rank_values(group.rank(), {1, k}).expand({t, k})};
    const at::Tensor w =
        rank_values(group.rank() + 10, {n + 2, 2 * k}).narrow(0, 2, n).narrow(1, 3, k);
    for (const at::Tensor& x : inputs) {
      const at::Tensor whole = reference::matmul_all_reduce(group, x, w);
      expect_close(matmul_reduce_scatter(poisoned(group), x, w, {}, options(), split),
                   whole.split_with_sizes(split)[static_cast<std::size_t>(group.rank())], "split");
      expect_close(matmul_all_reduce(poisoned(group), x, w, {}, options()), whole, "all_reduce");
      expect_close(all_gather_matmul(poisoned(group), x, w, {}, options()),
                   reference::all_gather_matmul(group, x, w), "all_gather");
    }
  });
}

/// Memory is what the largest call needed, however often the number of tokens changes.
TEST_P(CollectiveMatmul, ChangingTokenCountsKeepMemoryBounded) {
  run([&](const Group& group) {
    const at::Tensor w = rank_values(group.rank() + 10, {512, 16});
    (void)matmul_all_reduce(poisoned(group), rank_values(group.rank(), {130, 16}), w, {},
                            options());
    if (group.memory() == nullptr) return;
    const std::size_t one = group.memory()->bytes();
    for (int repeat = 0; repeat < 2; ++repeat) {
      for (const std::int64_t m : {8, 64, 6, 2, 130, 0, 64}) {
        const at::Tensor x = rank_values(group.rank(), {m, 16});
        expect_close(matmul_all_reduce(poisoned(group), x, w, {}, options()),
                     reference::matmul_all_reduce(group, x, w), "all_reduce");
        expect_close(matmul_reduce_scatter(poisoned(group), x, w, {}, options()),
                     reference::matmul_reduce_scatter(group, x, w), "reduce_scatter");
        expect_close(all_gather_matmul(poisoned(group), x, w, {}, options()),
                     reference::all_gather_matmul(group, x, w), "all_gather");
      }
      EXPECT_LE(group.memory()->bytes(), 8 * one);
    }
  });
}

/// Four ranks in groups of two by rows and by columns, operations of both in flight at once.
TEST_P(CollectiveMatmul, TwoGroupsAtWorkInOneProcess) {
  if (GetParam().size != 4) return;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  run([&](const Group& world) {
    const int row = world.rank() / 2, column = world.rank() % 2;
    const auto options_of = [&](int first, int second) {
      const auto& hosts = GetParam().hosts;
      return hosts.empty() ? test::on_hosts({}) : test::on_hosts({hosts[first], hosts[second]});
    };
    const auto tp =
        Group::create(store, fmt::format("tp{}", row), column, 2, options_of(2 * row, 2 * row + 1));
    const auto dp =
        Group::create(store, fmt::format("dp{}", column), row, 2, options_of(column, 2 + column));
    for (int i = 0; i < 5; ++i) {
      const at::Tensor x = rank_values(world.rank() + i, {31, 8}), w = rank_values(column, {12, 8});
      auto reduced = start_matmul_all_reduce(*tp, x, w, {}, options());
      auto scattered = start_matmul_reduce_scatter(*dp, x, w, {}, options());
      auto summed = start_all_reduce(*dp, x);
      expect_close(reduced.wait(), reference::matmul_all_reduce(*tp, x, w), "tp");
      expect_close(scattered.wait(), reference::matmul_reduce_scatter(*dp, x, w), "dp");
      expect_close(summed.wait(), all_reduce(*dp, x.to(at::kDouble)).to(at::kFloat), "dp sum");
    }
  });
}

TEST_P(CollectiveMatmul, IntegersMatchToTheBit) {
  run([&](const Group& group) {
    const at::Tensor x = rank_integers(group.rank(), {40, 24}),
                     w = rank_integers(group.rank() + 5, {16, 24});
    EXPECT_TRUE(at::equal(all_gather_matmul(poisoned(group), x, w, {}, options()),
                          reference::all_gather_matmul(group, x, w)));
    EXPECT_TRUE(at::equal(matmul_reduce_scatter(poisoned(group), x, w, {}, options()),
                          reference::matmul_reduce_scatter(group, x, w)));
    const at::Tensor y = matmul_all_reduce(poisoned(group), x, w, {}, options());
    const at::Tensor kept = y.clone();
    EXPECT_TRUE(at::equal(y, reference::matmul_all_reduce(group, x, w)));
    for (int i = 0; i < 9; ++i) (void)matmul_all_reduce(poisoned(group), x + i, w, {}, options());
    EXPECT_TRUE(at::equal(y, kept)) << "a result aliases a slot";
  });
}

TEST_P(CollectiveMatmul, LeadingDimensions) {
  run([&](const Group& group) {
    const at::Tensor x = rank_values(group.rank(), {6, 2, 8}),
                     w = rank_values(group.rank() + 10, {5, 8});
    expect_close(all_gather_matmul(poisoned(group), x, w, {}, options()),
                 reference::all_gather_matmul(group, x, w), "all_gather");
    const auto v2 = all_gather_matmul_v2(poisoned(group), x, w, {}, options());
    EXPECT_EQ(v2.x_full.sizes(), (std::vector<std::int64_t>{6 * group.size(), 2, 8}));
    expect_close(matmul_reduce_scatter(poisoned(group), x, w, {}, options()),
                 reference::matmul_reduce_scatter(group, x, w), "reduce_scatter");
    expect_close(matmul_all_reduce(poisoned(group), x, w, {}, options()),
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
    MatmulOptions mode = options();
    mode.whole_features = k;
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
          expect_close(matmul_all_reduce(poisoned(group), x, shard, {}, mode), expected.to(dtype),
                       what);
          expect_close(matmul_all_reduce(poisoned(group), x, shard, b, mode),
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
      all_gather_wgrad(poisoned(group), dy, x, dw, true, options());
      expect_close(dw, expected + 1, "accumulated");
      all_gather_wgrad(poisoned(group), dy, x, dw, false, options(), all);
      expect_close(dw, expected, "overwritten");

      // Row-parallel backward: dy sharded by rows, x whole.
      const at::Tensor dy_shard = rank_values(group.rank(), {rows, n}, dtype),
                       w = rank_values(group.rank() + 7, {n, k}, dtype);
      const at::Tensor x_whole = rank_values(group.rank() + 9, {m, k}, dtype),
                       dy_full = all_gather(group, dy_shard);
      at::Tensor dw2 = at::ones({n, k}), db = at::ones({n}, dtype);
      const at::Tensor dx = all_gather_matmul_backward(poisoned(group), dy_shard, w, x_whole, true,
                                                       dw2, true, db, options());
      expect_close(dx, reference::all_gather_matmul(group, dy_shard, w.t()), "dx");
      expect_close(dw2, dy_full.to(at::kDouble).t().mm(x_whole.to(at::kDouble)).to(at::kFloat) + 1,
                   "dw");
      expect_close(db, (dy_full.to(at::kDouble).sum(0) + 1).to(dtype), "db");
      EXPECT_FALSE(all_gather_matmul_backward(poisoned(group), dy_shard, w, x_whole, false, {},
                                              false, {}, options())
                       .defined());
    }
  });
  EXPECT_EQ(num_dropped_pending, 0);
}

}  // namespace
}  // namespace braid
