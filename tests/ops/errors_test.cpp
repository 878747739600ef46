// Bad input to the collective matmuls: a clear ValueError on every rank before any payload, no hang, and the group
// works on.
#include "tests/support/errors.h"

#include <gmock/gmock.h>

#include <future>

#include "braid/comm/collectives.h"
#include "braid/ops/collective_matmul.h"
#include "braid/ops/reference.h"
#include "tests/support/ranks.h"

namespace braid {
namespace {

using std::chrono_literals::operator""s;
using test::rank_integers;
using test::rank_values;
using test::run_ranks;
using testing::AnyOf;
using testing::HasSubstr;
using Rows = std::vector<std::int64_t>;

/// What the group gives after an error, in every mode.
void expect_works(const Group& group) {
  for (const MatmulOptions& options :
       {MatmulOptions{Mode::serial}, MatmulOptions{Mode::chunked, 3}, MatmulOptions{Mode::fused}}) {
    const at::Tensor x = rank_integers(group.rank(), {9, 4}), w = rank_integers(7, {5, 4});
    EXPECT_TRUE(at::equal(all_gather_matmul(group, x, w, {}, options),
                          reference::all_gather_matmul(group, x, w)));
    EXPECT_TRUE(at::equal(matmul_all_reduce(group, x, w, {}, options),
                          reference::matmul_all_reduce(group, x, w)));
  }
}

/// What a rank can see by itself.
struct Mistake {
  const char* text;
  std::function<void(const Group&)> call;
};

std::vector<Mistake> mistakes() {
  const at::Tensor x = at::ones({4, 3}), w = at::ones({5, 3}), narrow = at::ones({5, 2});
  const at::Tensor dy = at::ones({8, 5}), dy_shard = at::ones({4, 5}), dw = at::ones({5, 3});
  const at::Tensor bf16 = w.to(at::kBFloat16), whole = at::ones({8, 3});
  const Int8Weight int8 = quantize_weight(w);
  const MatmulOptions serial{Mode::serial}, no_chunks{Mode::chunked, 0};
  const auto gather = [=](const at::Tensor& weight, const at::Tensor& bias, MatmulOptions options,
                          const Rows& rows = {}) {
    return [=](const Group& g) { (void)all_gather_matmul(g, x, weight, bias, options, rows); };
  };
  const auto scatter = [=](const at::Tensor& weight, const at::Tensor& bias, MatmulOptions options,
                           const Rows& rows = {}) {
    return [=](const Group& g) { (void)matmul_reduce_scatter(g, x, weight, bias, options, rows); };
  };
  const auto reduce = [=](const at::Tensor& the_x, const auto& weight, const at::Tensor& bias,
                          MatmulOptions options) {
    return [=](const Group& g) { (void)matmul_all_reduce(g, the_x, weight, bias, options); };
  };
  const auto wgrad = [=](const at::Tensor& the_dy, const at::Tensor& the_dw, MatmulOptions options,
                         const Rows& rows = {}) {
    return [=](const Group& g) { all_gather_wgrad(g, the_dy, x, the_dw, false, options, rows); };
  };
  const auto backward = [=](const at::Tensor& weight, const at::Tensor& the_x,
                            const at::Tensor& the_dw, const at::Tensor& db, MatmulOptions options,
                            const Rows& rows = {}) {
    return [=](const Group& g) {
      (void)all_gather_matmul_backward(g, dy_shard, weight, the_x, true, the_dw, false, db, options,
                                       rows);
    };
  };
  const auto v2 = [=](const at::Tensor& weight, const Rows& rows) {
    return
        [=](const Group& g) { (void)all_gather_matmul_v2(g, x, weight, {}, {Mode::fused}, rows); };
  };
  return {
      // The inner dimension.
      {"all_gather_matmul: inner dimensions differ: x has k = 3, weight has k = 2",
       gather(narrow, {}, serial)},
      {"all_gather_matmul_v2: inner dimensions differ", v2(narrow, {})},
      {"matmul_reduce_scatter: inner dimensions differ", scatter(narrow, {}, {})},
      {"matmul_all_reduce: inner dimensions differ", reduce(x, narrow, {}, {Mode::fused})},
      {"matmul_all_reduce_int8: inner dimensions differ: x has k = 2, weight has k = 3",
       reduce(at::ones({4, 2}), int8, {}, {})},
      {"all_gather_wgrad: dw has shape [5, 2]", wgrad(dy, narrow, {})},
      {"all_gather_matmul_backward: inner dimensions differ",
       backward(at::ones({4, 3}), whole, dw, {}, {})},
      {"all_gather_matmul_backward: dw has shape [5, 2]", backward(w, whole, narrow, {}, {})},
      {"all_gather_matmul_backward: db does not have the n = 5",
       backward(w, whole, dw, at::ones({4}), {})},
      {"matmul_all_reduce: x has 1 dims", reduce(at::ones({3}), w, {}, {})},
      // Types.
      {"all_gather_matmul: dtypes differ: x is Float, weight is BFloat16", gather(bf16, {}, {})},
      {"matmul_reduce_scatter: dtypes differ", scatter(bf16, {}, serial)},
      {"matmul_all_reduce: dtypes differ: x is Float, bias is Half",
       reduce(x, w, at::ones({5}, at::kHalf), {})},
      {"matmul_all_reduce: x is Long", reduce(x.to(at::kLong), w.to(at::kLong), {}, {})},
      {"matmul_all_reduce_int8: x is Double", reduce(x.to(at::kDouble), int8, {}, {})},
      {"all_gather_wgrad: dtypes differ: dy is BFloat16", wgrad(dy.to(at::kBFloat16), dw, {})},
      {"all_gather_wgrad: dw is BFloat16", wgrad(dy, bf16, {})},
      {"all_gather_matmul_backward: dtypes differ", backward(bf16, whole, dw, {}, {})},
      // The bias.
      {"matmul_reduce_scatter: bias has shape [4], weight has n = 5",
       scatter(w, at::ones({4}), {})},
      {"matmul_all_reduce_int8: bias has shape [4]", reduce(x, int8, at::ones({4}), {})},
      // Rows of a group of another size, and rows that aren't those of x.
      {"all_gather_matmul: rows has 3 entries, group", gather(w, {}, {}, {4, 4, 4})},
      {"all_gather_matmul_v2: rows has 1 entries, group", v2(w, {4})},
      {"matmul_reduce_scatter: rows has 3 entries, group", scatter(w, {}, {}, {1, 1, 2})},
      {"all_gather_wgrad: rows has 3 entries, group", wgrad(dy, dw, serial, {4, 2, 2})},
      {"all_gather_matmul_backward: rows has 3 entries, group",
       backward(w, whole, dw, {}, {Mode::fused}, {4, 2, 2})},
      {"are given as 3, its shard has 4", gather(w, {}, {}, {3, 3})},
      {"matmul_reduce_scatter: rows of the ranks add up to 3, x has 4", scatter(w, {}, {}, {1, 2})},
      {"matmul_reduce_scatter: rows has an entry of -1", scatter(w, {}, {}, {5, -1})},
      {"all_gather_wgrad: the ranks' shards have 8 rows, dy has 6",
       wgrad(at::ones({6, 5}), dw, {}, {4, 4})},
      {"all_gather_matmul_backward: the ranks' shards have 8 rows, x has 6",
       backward(w, at::ones({6, 3}), dw, {}, {}, {4, 4})},
      // Chunks.
      {"all_gather_matmul: num_chunks is 0", gather(w, {}, no_chunks)},
      {"matmul_reduce_scatter: num_chunks is 0", scatter(w, {}, no_chunks)},
      {"matmul_all_reduce: num_chunks is 0", reduce(x, w, {}, no_chunks)},
      {"matmul_all_reduce_int8: num_chunks is 0", reduce(x, int8, {}, no_chunks)},
      {"all_gather_wgrad: num_chunks is 0", wgrad(dy, dw, no_chunks)},
      {"all_gather_matmul_backward: num_chunks is 0", backward(w, whole, dw, {}, no_chunks)},
      {"num_chunks is -2", gather(w, {}, {Mode::chunked, -2})},
      // Scales.
      {"scales", [](const Group& g) {
         (void)matmul_all_reduce(g, at::ones({4, 3}),
                                 Int8Weight(at::ones({5, 3}, at::kChar), at::ones({4})));
       }}};
}

/// Rank 0 makes each alone, where a message would wait; then rank 1 does.
TEST(CollectiveMatmulErrors, CallersMistakesComeBeforeAnyMessage) {
  for (const bool shared_memory : {true, false}) {
    std::promise<void> made;
    run_ranks(2,
              [&](const auto& group) {
                if (group->rank() == 1) made.get_future().wait();
                {
                  const std::shared_ptr<void> told(nullptr, [&](void*) {
                    if (group->rank() == 0) made.set_value();
                  });
                  for (const Mistake& mistake : mistakes())
                    EXPECT_THAT(test::value_error([&] { mistake.call(*group); }),
                                HasSubstr(mistake.text));
                }
                expect_works(*group);
              },
              {5s, shared_memory});
  }
}

struct Disagreement {
  const char* name;
  MatmulOptions options;
  bool shared_memory = true;
  bool rows_known = false;
};
void PrintTo(const Disagreement& d, std::ostream* out) {
  *out << d.name << (d.shared_memory ? "" : " over the network")
       << (d.rows_known ? ", rows known" : "");
}

std::vector<Disagreement> disagreements() {
  std::vector<Disagreement> result;
  for (const bool rows_known : {false, true}) {
    result.push_back({"serial", {Mode::serial}, true, rows_known});
    result.push_back({"chunked", {Mode::chunked, 3}, true, rows_known});
    result.push_back({"fused", {Mode::fused}, true, rows_known});
    result.push_back({"auto", {Mode::automatic}, true, rows_known});
  }
  // With rows that are known the group cannot go on: below.
  result.push_back({"serial", {Mode::serial}, false});
  result.push_back({"chunked", {Mode::chunked, 3}, false});
  result.push_back({"fused", {Mode::fused}, false});
  return result;
}

/// Shards that have not the same features on all ranks.
class GatherOfUnequalShards : public testing::TestWithParam<Disagreement> {};
INSTANTIATE_TEST_SUITE_P(Modes, GatherOfUnequalShards, testing::ValuesIn(disagreements()));

TEST_P(GatherOfUnequalShards, IsTheSameErrorOnEveryRankAndTheGroupWorksOn) {
  const auto& [name, options, shared_memory, rows_known] = GetParam();
  using Call = std::function<void(const Group&, std::int64_t k, const Rows&)>;
  const std::vector<Call> calls{
      [&](const Group& g, std::int64_t k, const Rows& rows) {
        (void)all_gather_matmul(g, at::ones({4, k}), at::ones({5, k}), {}, options, rows);
      },
      [&](const Group& g, std::int64_t k, const Rows& rows) {
        (void)all_gather_matmul_v2(g, at::ones({4, k}), at::ones({5, k}), {}, options, rows);
      },
      [&](const Group& g, std::int64_t k, const Rows& rows) {
        all_gather_wgrad(g, at::ones({12, 5}), at::ones({4, k}), at::empty({5, k}), false, options,
                         rows);
      },
      [&](const Group& g, std::int64_t k, const Rows& rows) {
        (void)all_gather_matmul_backward(g, at::ones({4, k}), at::ones({k, 5}), at::ones({12, 5}),
                                         true, at::empty({k, 5}), false, at::zeros({k}), options,
                                         rows);
      }};
  std::array<std::vector<std::string>, 3> texts;
  run_ranks(3,
            [&](const auto& group) {
              for (const Call& call : calls) {
                for (int repeat = 0; repeat < 2; ++repeat)
                  texts[static_cast<std::size_t>(group->rank())].push_back(test::value_error([&] {
                    call(*group, group->rank() == 1 ? 7 : 6, rows_known ? Rows{4, 4, 4} : Rows{});
                  }));
                expect_works(*group);
              }
            },
            {5s, shared_memory});
  for (const std::string& text : texts[0]) {
    EXPECT_THAT(text, HasSubstr("ranks 0 and 1 of group"));
    EXPECT_THAT(text, HasSubstr("6"));
    EXPECT_THAT(text, HasSubstr("7"));
  }
  EXPECT_EQ(texts[0], texts[1]);
  EXPECT_EQ(texts[0], texts[2]);
  num_dropped_pending = 0;  // on purpose here
}

/// Between hosts, where the group can't go on; a rank that has only heard of it names who differs.
TEST(CollectiveMatmulErrors, DisagreementBetweenHostsIsAnErrorOfAll) {
  struct Call {
    const char* disagree_in;
    std::function<void(const Group&, bool is_other)> run;
  };
  const std::vector<Call> calls{
      {"n: 5 and 6",
       [](const Group& group, bool is_other) {
         (void)matmul_all_reduce(group, at::ones({4, 3}), at::ones({is_other ? 6 : 5, 3}), {},
                                 {Mode::chunked, 2});
       }},
      {"dtype: Float and Half",
       [](const Group& group, bool is_other) {
         const std::vector<std::int64_t> ones(static_cast<std::size_t>(group.size()), 1);
         (void)start_all_to_all(
             group, at::ones({group.size(), 3}, is_other ? at::kHalf : at::kFloat), ones, ones)
             .wait();
       }},
      {"rows and tiles (hash): ", [](const Group& group, bool is_other) {
         (void)all_gather_matmul(group, at::ones({8, 3}), at::ones({5, 3}), {},
                                 {Mode::chunked, is_other ? 4 : 2});
       }}};
  for (const Call& call : calls) {
    for (const test::HostNumbers& hosts :
         std::vector<test::HostNumbers>{{0, 1}, {0, 1, 2}, {0, 0, 1}, {0, 1, 1, 0}}) {
      const int size = static_cast<int>(hosts.size());
      std::vector<std::string> texts(hosts.size());
      run_ranks(
          size,
          [&](const auto& group) {
            expect_works(*group);
            for (int repeat = 0; repeat < 2; ++repeat) {
              std::string text;
              try {
                call.run(*group, group->rank() == size - 1);
              } catch (const c10::Error& error) {
                text = error.what_without_backtrace();
              }
              EXPECT_THAT(text, AnyOf(HasSubstr(fmt::format("and {} of group", size - 1)),
                                      HasSubstr("lost rank")));
              texts[static_cast<std::size_t>(group->rank())] = text;
            }
          },
          test::on_hosts(hosts, std::chrono::seconds(5)));
      EXPECT_THAT(texts.back(), HasSubstr(fmt::format("disagree in {}", call.disagree_in)))
          << test::name_of(hosts);
      for (const std::string& text : texts) {
        if (hosts == test::apart(size)) {
          EXPECT_EQ(text, texts[0]);
        }
      }
    }
  }
  num_dropped_pending = 0;  // on purpose here
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

/// What a rank has sent its peers need, also where it goes on with an error of its own.
TEST(CollectiveMatmulErrors, BetweenHostsARanksOwnErrorHoldsUpNobody) {
  for (const test::HostNumbers& hosts : std::vector<test::HostNumbers>{{0, 1}, {0, 1, 1}}) {
    const int size = static_cast<int>(hosts.size());
    run_ranks(
        size,
        [&](const auto& group) {
          const std::int64_t rows = 4 * size;
          const auto run = [&](std::int64_t rows_of_dy) {
            constexpr std::int64_t kFeatures = 1 << 20;  // more bytes than fit into a socket
            all_gather_wgrad(*group, at::ones({rows_of_dy, 2}), at::ones({4, kFeatures}),
                             at::empty({2, kFeatures}), false, {Mode::chunked, 2});
          };
          if (group->rank() == 0)
            EXPECT_THAT(test::value_error([&] { run(rows + 1); }), HasSubstr("dy"));
          else
            run(rows);
          expect_works(*group);
        },
        test::on_hosts(hosts, std::chrono::seconds(5)));
  }
  num_dropped_pending = 0;  // on purpose here
}

}  // namespace
}  // namespace braid
