// Column and row layers against unsharded torch: y, dX, dW, db each for itself, on every rank.
#include "braid/layers/parallel_linear.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <string>
#include <vector>

#include "tests/layers/support.h"
#include "tests/support/poison.h"

namespace braid::test {
namespace {

constexpr double kTolerance = 1e-5;

struct Case {
  int num_ranks = 1;
  bool sequence_parallel = false;
  Mode mode = Mode::serial;
  bool ring = false;
  bool keep_gathered = false;
  bool needs_dx = true, needs_dw = true, bias = true, needs_db = true, main_grad = false;
  bool uneven = false;  // rows of the ranks that split_rows would not give
  std::int64_t t = 13, k = 10, n = 14;

  std::string name() const {
    return "ranks " + std::to_string(num_ranks) + " sp " + std::to_string(sequence_parallel) +
           " mode " + std::to_string(static_cast<int>(mode)) + " ring " + std::to_string(ring) +
           " keep " + std::to_string(keep_gathered) + " dx " + std::to_string(needs_dx) + " dw " +
           std::to_string(needs_dw) + " bias " + std::to_string(bias) + " main_grad " +
           std::to_string(main_grad) + " uneven " + std::to_string(uneven) + " t " +
           std::to_string(t);
  }
};

at::Tensor leaf(const at::Tensor& x, bool requires_grad = true) {
  return x.detach().clone().set_requires_grad(requires_grad);
}

/// The whole layer in one place, its loss sum(y * g), and all its gradients.
struct Whole {
  explicit Whole(const Case& c)
      : x(leaf(rank_values(0, {c.t, c.k}))),
        w(leaf(rank_values(1, {c.n, c.k}))),
        b(leaf(rank_values(2, {c.n}))),
        g(rank_values(3, {c.t, c.n})) {
    y = c.bias ? at::linear(x, w, b) : at::linear(x, w);
    (y * g).sum().backward();
  }
  at::Tensor x, w, b, g, y;
};

/// All rows for the last rank but one, which rank 0 has; none for those between.
std::vector<std::int64_t> uneven_rows(std::int64_t t, int ranks) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(ranks), 0);
  rows[0] = std::min<std::int64_t>(t, 1);
  rows.back() += t - rows[0];
  return rows;
}

/// One rank's layer on its parts; which dims are split is what tells column from row.
void check_rank(const Case& c, const std::shared_ptr<Group>& group, const Whole& whole,
                bool column) {
  const int rank = group->rank(), ranks = group->size();
  const auto part = [&](const at::Tensor& x, int dim) { return part_of(x, dim, rank, ranks); };
  const auto counts = c.uneven ? uneven_rows(c.t, ranks) : split_rows(c.t, ranks);
  const auto rows = [&](const at::Tensor& x) {
    return c.sequence_parallel
               ? x.narrow(0, first_row(counts, rank), counts[static_cast<std::size_t>(rank)])
               : x;
  };
  const auto x_part = [&](const at::Tensor& x) { return column ? rows(x) : part(x, 1); };
  const auto w_part = [&](const at::Tensor& w) { return part(w, column ? 0 : 1); };
  const auto b_part = [&](const at::Tensor& b) { return column ? part(b, 0) : b; };
  const auto y_part = [&](const at::Tensor& y) { return column ? part(y, 1) : rows(y); };

  const auto x = leaf(x_part(whole.x), c.needs_dx), w = leaf(w_part(whole.w), c.needs_dw);
  const auto b = c.bias ? leaf(b_part(whole.b), c.needs_db) : at::Tensor();
  LinearOptions options{group, c.sequence_parallel, {c.mode, 3, c.ring}, c.keep_gathered, {}, {}};
  options.matmul.whole_features = column ? c.n : c.k;
  if (c.sequence_parallel && (c.uneven || c.needs_dx)) options.rows = counts;
  const auto before = at::full(w.sizes(), 0.5);
  if (c.main_grad) options.main_grad = before.clone();

  poison(*group);
  const auto y = (column ? column_parallel_linear : row_parallel_linear)(x, w, b, options);
  expect_close(y, y_part(whole.y), kTolerance, c.name() + " y");
  poison(*group);
  if (y.requires_grad()) (y * y_part(whole.g)).sum().backward();
  if (c.needs_dx) {
    expect_close(x.grad(), x_part(whole.x.grad()), kTolerance, c.name() + " dX");
  } else {
    EXPECT_FALSE(x.grad().defined()) << c.name();
  }
  EXPECT_EQ(c.bias && b.grad().defined(), c.bias && c.needs_db) << c.name();
  if (c.bias && c.needs_db)
    expect_close(b.grad(), b_part(whole.b.grad()), kTolerance, c.name() + " db");
  if (c.main_grad) {
    EXPECT_FALSE(w.grad().defined()) << c.name();
    const auto expected = c.needs_dw ? before + w_part(whole.w.grad()) : before;
    expect_close(options.main_grad, expected, kTolerance, c.name() + " main_grad");
  } else if (c.needs_dw) {
    expect_close(w.grad(), w_part(whole.w.grad()), kTolerance, c.name() + " dW");
  } else {
    EXPECT_FALSE(w.grad().defined()) << c.name();
  }
}

/// Slots and new tensors hold NaN, so that an element that nobody wrote shows.
void check(const std::vector<Case>& cases, const std::vector<int>& ranks, bool column) {
  at::globalContext().setDeterministicAlgorithms(true, true);
  for (const int num_ranks : ranks) {
    run_ranks(num_ranks, [&](const std::shared_ptr<Group>& group) {
      ASSERT_TRUE(at::empty({3}).isnan().all().item<bool>());
      for (Case c : cases) {
        c.num_ranks = num_ranks;
        check_rank(c, group, Whole(c), column);
      }
    });
  }
  at::globalContext().setDeterministicAlgorithms(false, false);
  EXPECT_EQ(num_dropped_pending, 0);
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const Mode mode : {Mode::serial, Mode::chunked, Mode::fused, Mode::automatic}) {
    for (const int bits : {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}) {
      Case c;
      c.mode = mode;
      c.sequence_parallel = (bits & 1) != 0;
      c.needs_dx = (bits & 2) == 0;
      c.needs_dw = (bits & 4) == 0;
      c.bias = (bits & 8) == 0;
      cases.push_back(c);
      c.main_grad = true;
      cases.push_back(c);
      c.keep_gathered = true;
      if (c.sequence_parallel) cases.push_back(c);
    }
    for (const int bits : {0, 1, 2, 3}) {
      Case c;
      c.mode = mode;
      c.sequence_parallel = true;
      c.uneven = true;
      c.needs_db = false;
      c.keep_gathered = (bits & 1) != 0;
      c.main_grad = (bits & 2) != 0;
      cases.push_back(c);
    }
    for (const std::int64_t t : {0, 1, 3, 64}) {  // fewer rows than ranks, none at all, even
      for (const bool sequence_parallel : {false, true}) {
        Case c;
        c.mode = mode;
        c.t = t;
        c.sequence_parallel = sequence_parallel;
        c.main_grad = true;
        cases.push_back(c);
      }
    }
  }
  return cases;
}

/// Rows in every split: even, of split_rows, of one's own choice; fewer than ranks, none at all.
std::vector<Case> cases_of_many_ranks() {
  std::vector<Case> cases;
  for (const auto& [mode, ring] : {std::pair(Mode::serial, false), std::pair(Mode::chunked, false),
                                   std::pair(Mode::fused, false), std::pair(Mode::fused, true)}) {
    for (const int bits : {0, 1, 2, 3, 4, 5, 6, 7}) {
      Case c;
      c.mode = mode;
      c.ring = ring;
      c.sequence_parallel = (bits & 1) != 0;
      c.main_grad = (bits & 2) != 0;
      c.keep_gathered = c.sequence_parallel && (bits & 4) != 0;
      for (const std::int64_t t : {0, 3, 13, 40}) {
        c.t = t;
        c.uneven = false;
        cases.push_back(c);
        c.uneven = true;
        if (c.sequence_parallel) cases.push_back(c);
      }
    }
  }
  return cases;
}

class ParallelLinearOfRanks : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Layers, ParallelLinearOfRanks, testing::Bool(),
                         [](const auto& column) { return column.param ? "Column" : "Row"; });
TEST_P(ParallelLinearOfRanks, EqualsTheWholeLayer) { check(all_cases(), {1, 2, 3, 4}, GetParam()); }
TEST_P(ParallelLinearOfRanks, EqualsTheWholeLayerOnFiveAndEight) {
  check(cases_of_many_ranks(), {5, 8}, GetParam());
}

/// Gradients that come as a broadcast (sum) or transposed, and inputs that are strided, of three dims.
TEST(ParallelLinear, StridedInputsAndGradients) {
  for (const int num_ranks : {1, 2, 3}) {
    run_ranks(num_ranks, [&](const std::shared_ptr<Group>& group) {
      const int rank = group->rank(), ranks = group->size();
      for (const bool sequence_parallel : {false, true}) {
        for (const bool transposed : {false, true}) {
          const std::int64_t s = 6, b = 2, k = 12, n = 18;
          const auto x0 = rank_values(0, {s, k, b}).transpose(1, 2),
                     w0 = rank_values(1, {k, n}).t();
          const auto loss = [&](const at::Tensor& y) {
            return transposed ? (y.transpose(0, 2).exp()).sum() : y.sum();
          };
          const auto x = leaf(x0), w = leaf(w0);
          loss(at::linear(x, w) * 0.1).backward();
          const std::string what =
              "ranks " + std::to_string(ranks) + " sp " + std::to_string(sequence_parallel);

          const LinearOptions options{group, sequence_parallel, {Mode::chunked, 2}, false, {}, {}};
          const auto rows = [&](const at::Tensor& z) {
            return sequence_parallel ? part_of(z, 0, rank, ranks) : z;
          };
          {
            const auto xr = rows(x0).detach().set_requires_grad(true);
            const auto wr = part_of(w0, 0, rank, ranks).detach().set_requires_grad(true);
            loss(column_parallel_linear(xr, wr, {}, options) * 0.1).backward();
            expect_close(xr.grad(), rows(x.grad()), kTolerance, what + " column dX");
            expect_close(wr.grad(), part_of(w.grad(), 0, rank, ranks), kTolerance,
                         what + " column dW");
          }
          {
            const auto xr = part_of(x0, 2, rank, ranks).detach().set_requires_grad(true);
            const auto wr = part_of(w0, 1, rank, ranks).detach().set_requires_grad(true);
            loss(row_parallel_linear(xr, wr, {}, options) * 0.1).backward();
            expect_close(xr.grad(), part_of(x.grad(), 2, rank, ranks), kTolerance,
                         what + " row dX");
            expect_close(wr.grad(), part_of(w.grad(), 1, rank, ranks), kTolerance,
                         what + " row dW");
          }
        }
      }
    });
  }
}

/// bf16: the main gradient is f32 and takes no more error than the rounding of the operands allows.
TEST(ParallelLinear, HalfTypesIntoMainGradient) {
  for (const bool sequence_parallel : {false, true}) {
    for (const bool keep_gathered : {false, true}) {
      run_ranks(2, [&](const std::shared_ptr<Group>& group) {
        const int rank = group->rank();
        const std::int64_t t = 700, k = 16, n = 12;
        const auto x0 = rank_values(0, {t, k}, at::kBFloat16),
                   w0 = rank_values(1, {n, k}, at::kBFloat16);
        const auto g = rank_values(3, {t, n}, at::kBFloat16);
        const auto dw = at::mm(g.to(at::kDouble).t(), x0.to(at::kDouble));
        LinearOptions options{group, sequence_parallel, {Mode::chunked, 2}, keep_gathered, {}, {}};
        const auto rows = [&](const at::Tensor& z) {
          return sequence_parallel ? part_of(z, 0, rank, 2) : z;
        };
        options.main_grad = at::zeros({n / 2, k});
        auto y = column_parallel_linear(leaf(rows(x0)), leaf(part_of(w0, 0, rank, 2)), {}, options);
        y.backward(part_of(g, 1, rank, 2));
        expect_close(options.main_grad, part_of(dw, 0, rank, 2), 1e-6, "column main_grad");
        options.main_grad = at::zeros({n, k / 2});
        y = row_parallel_linear(leaf(part_of(x0, 1, rank, 2)), leaf(part_of(w0, 1, rank, 2)), {},
                                options);
        y.backward(rows(g));
        expect_close(options.main_grad, part_of(dw, 1, rank, 2), 1e-6, "row main_grad");
      });
    }
  }
}

/// In the weight's own type each use adds once, rounded once.
TEST(ParallelLinear, MainGradientInTheWeightsType) {
  for (const bool sequence_parallel : {false, true}) {
    run_ranks(2, [&](const std::shared_ptr<Group>& group) {
      const int rank = group->rank();
      const std::int64_t t = 30, k = 16, n = 12;
      const auto x0 = rank_values(0, {t, k}, at::kBFloat16),
                 w0 = rank_values(1, {n, k}, at::kBFloat16),
                 g = rank_values(3, {t, n}, at::kBFloat16);
      const auto dw = at::mm(g.to(at::kDouble).t(), x0.to(at::kDouble)) + 3;
      const auto rows = [&](const at::Tensor& z) {
        return sequence_parallel ? part_of(z, 0, rank, 2) : z;
      };
      LinearOptions options{group, sequence_parallel, {Mode::fused}, false, {}, {}};
      options.main_grad = at::full({n / 2, k}, 3, at::kBFloat16);
      auto y = column_parallel_linear(leaf(rows(x0)), leaf(part_of(w0, 0, rank, 2)), {}, options);
      y.backward(part_of(g, 1, rank, 2));
      EXPECT_TRUE(at::equal(options.main_grad, part_of(dw, 0, rank, 2).to(at::kBFloat16)));
      options.main_grad = at::full({n, k / 2}, 3, at::kBFloat16);
      y = row_parallel_linear(leaf(part_of(x0, 1, rank, 2)), leaf(part_of(w0, 1, rank, 2)), {},
                              options);
      y.backward(rows(g));
      EXPECT_TRUE(at::equal(options.main_grad, part_of(dw, 1, rank, 2).to(at::kBFloat16)));
    });
  }
}

/// More chunks than rows, and than operations can be in flight: backward has two streams at once.
TEST(ParallelLinear, ManyChunks) {
  for (const int num_chunks : {64, 5000}) {
    run_ranks(2, [&](const std::shared_ptr<Group>& group) {
      const std::int64_t t = 300, k = 4, n = 6;
      LinearOptions options{group, true, {Mode::chunked, num_chunks}, false, {}, split_rows(t, 2)};
      const auto x = leaf(part_of(rank_values(0, {t, k}), 0, group->rank(), 2));
      const auto w = leaf(part_of(rank_values(1, {n, k}), 0, group->rank(), 2));
      const auto y = column_parallel_linear(x, w, {}, options);
      y.backward(at::ones_like(y));
      const auto dw = at::mm(at::ones({n / 2, t}), rank_values(0, {t, k}));
      expect_close(w.grad(), dw, kTolerance, "dw");
      const auto dx = at::mm(at::ones({t, n}), rank_values(1, {n, k}));
      expect_close(x.grad(), part_of(dx, 0, group->rank(), 2), kTolerance, "dx");
    });
  }
}

TEST(ParallelLinear, AddsToTheMainGradientAtEveryUse) {
  const auto w = leaf(rank_values(0, {3, 4}));
  LinearOptions options;
  options.main_grad = at::zeros({3, 4});
  const auto x = rank_values(1, {5, 4});
  (column_parallel_linear(x, w, {}, options) + row_parallel_linear(x, w, {}, options))
      .sum()
      .backward();
  expect_close(options.main_grad, 2 * at::mm(at::ones({3, 5}), x), kTolerance,
               "main_grad of a weight used twice");
}

TEST(ParallelLinear, OutputMayBeWrittenInPlace) {
  const auto w = leaf(rank_values(0, {3, 4})), x = leaf(rank_values(1, {5, 2, 4}));
  auto y = column_parallel_linear(x, w, {}, {});
  EXPECT_FALSE(y.is_view());
  y.mul_(2);
  y.sum().backward();
  expect_close(x.grad(), 2 * at::matmul(at::ones({5, 2, 3}), w), kTolerance, "dX");
}

TEST(ParallelLinear, CallersMistakes) {
  const auto x = rank_values(0, {5, 4}), w = rank_values(1, {3, 4});
  LinearOptions options;
  EXPECT_THROW(column_parallel_linear(x, rank_values(0, {3, 5}), {}, options), c10::ValueError);
  EXPECT_THROW(column_parallel_linear(x, w, rank_values(0, {4}), options), c10::ValueError);
  EXPECT_THROW(row_parallel_linear(x, w.to(at::kBFloat16), {}, options), c10::ValueError);
  options.main_grad = at::zeros({4, 3});
  EXPECT_THROW(row_parallel_linear(x, w, {}, options), c10::ValueError);
  options.main_grad = at::zeros({3, 4}, at::kBFloat16);  // neither f32 nor the weight's type
  EXPECT_THROW(row_parallel_linear(x, w, {}, options), c10::ValueError);
  run_ranks(2, [&](const std::shared_ptr<Group>& group) {
    LinearOptions o{group, true, {}, false, {}, {5, 4}};
    EXPECT_THROW(column_parallel_linear(x.narrow(0, 0, 3), w, {}, o), c10::ValueError);
    EXPECT_THROW(row_parallel_linear(rank_values(0, {3, 2, 4}), w, {}, o), c10::ValueError);
    o.rows = {};
    EXPECT_THROW(row_parallel_linear(rank_values(0, {3, 2, 4}), w, {}, o), c10::ValueError);
    o.rows = {6};
    EXPECT_THROW(row_parallel_linear(rank_values(0, {3, 2, 4}), w, {}, o), c10::ValueError);
  });
}

}  // namespace
}  // namespace braid::test
