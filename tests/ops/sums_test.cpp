// What is promised of sums: rounded once, in f32, the same bits on every rank and in every run, whoever is late.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "braid/comm/collectives.h"
#include "braid/ops/collective_matmul.h"
#include "braid/ops/tuner.h"
#include "tests/support/ranks.h"

namespace braid {
namespace {

using test::rank_values;
using test::run_ranks;

struct Form {
  const char* name;
  MatmulOptions options;
  bool shared_memory = true;
  bool deterministic = false;  // as with --deterministic: nothing is measured
};
const std::vector<Form> kForms{
    {"serial", {.mode = Mode::serial}},
    {"serial, native", {.mode = Mode::serial, .native = true}},
    {"serial, through f32", {.mode = Mode::serial, .native = false}},
    {"chunked", {.mode = Mode::chunked, .num_chunks = 3}},
    {"chunked, native", {.mode = Mode::chunked, .num_chunks = 3, .native = true}},
    {"chunked, through f32", {.mode = Mode::chunked, .num_chunks = 3, .native = false}},
    {"fused", {.mode = Mode::fused}},
    {"fused, native", {.mode = Mode::fused, .native = true}},
    {"fused, through f32", {.mode = Mode::fused, .native = false}},
    {"ring", {.mode = Mode::fused, .ring = true}},
    {"serial, network", {.mode = Mode::serial}, false},
    {"chunked, network", {.mode = Mode::chunked, .num_chunks = 3}, false},
    {"fused, network", {.mode = Mode::fused}, false},
    {"auto, deterministic", {.mode = Mode::automatic}, true, true},
    {"auto, deterministic, network", {.mode = Mode::automatic}, false, true},
};
std::string what(const Form& form, int size, at::ScalarType dtype) {
  return fmt::format("{} on {}, {}", form.name, size, c10::toString(dtype));
}

/// Ranks of a form.
void run_form(const Form& form, int size, const std::function<void(const Group&)>& fn) {
  run_ranks(size,
            [&](const auto& group) {
              tuner::allow_live(!form.deterministic);
              fn(*group);
            },
            {std::chrono::seconds(30), form.shared_memory});
}

bool all_are(const at::Tensor& y, double value) {
  return y.eq(at::full({}, value, y.scalar_type())).all().item<bool>();
}

/// 256, 1, 1, 1 in bf16 is 256 or 260, by where it is rounded: bf16 has no 257 to 259 (so Gloo's own sum is either, by
/// position). In fp16 so for 2048. A bias of 2 is added once, not by every rank, and before the sum is rounded.
TEST(Sums, OfHalfPartialsAreRoundedOnce) {
  for (const int size : {2, 4, 8}) {
    for (const Form& form : kForms) {
      run_form(form, size, [&](const Group& group) {
        for (const auto& [dtype, large] :
             {std::pair(at::kBFloat16, 256.), std::pair(at::kHalf, 2048.)}) {
          // Few rows and, by the rule of mode auto, many.
          for (const std::int64_t m : {33, form.deterministic ? 130 * size : 33}) {
            const at::Tensor x = at::full({m, 1}, group.rank() == 0 ? large : 1, dtype),
                             w = at::ones({5, 1}, dtype), b = at::full({5}, 2, dtype);
            const Int8Weight int8(at::ones({5, 1}, at::kChar), at::ones({1}));
            const double sum = large + size - 1, added = 2;
            const auto options = form.options;
            const std::string of = what(form, size, dtype);
            EXPECT_TRUE(all_are(matmul_all_reduce(group, x, w, {}, options), sum)) << of;
            EXPECT_TRUE(all_are(matmul_all_reduce(group, x, w, b, options), sum + added)) << of;
            EXPECT_TRUE(all_are(matmul_all_reduce(group, x, int8, {}, options), sum)) << of;
            EXPECT_TRUE(all_are(matmul_all_reduce(group, x, int8, b, options), sum + added)) << of;
            EXPECT_TRUE(all_are(matmul_reduce_scatter(group, x, w, {}, options), sum)) << of;
            EXPECT_TRUE(all_are(matmul_reduce_scatter(group, x, w, b, options), sum + added)) << of;
            EXPECT_TRUE(all_are(all_reduce(group, x), sum)) << of;
            EXPECT_TRUE(all_are(reduce_scatter(group, x), sum)) << of;
          }
        }
      });
    }
  }
}

/// Every rank's bits, over several runs in which other ranks come late.
TEST(Sums, BitsDependOnNoDelayAndAreEqualOnAllRanks) {
  const std::vector<at::ScalarType> dtypes{at::kFloat, at::kBFloat16, at::kHalf};
  const Int8Weight whole = quantize_weight(rank_values(3, {30, 8 * 40}), {Granularity::group, 24});
  for (const int size : {2, 3, 4, 8}) {
    for (const Form& form : kForms) {
      struct Results {
        std::vector<at::Tensor> reduced, reduced_int8;  // of all ranks and runs
        std::map<int, std::vector<at::Tensor>> scattered;
      };
      std::mutex mutex;
      std::map<at::ScalarType, Results> results;
      for (int run = 0; run < 3; ++run) {
        run_form(form, size, [&](const Group& group) {
          std::mt19937 generator(static_cast<unsigned>(10 * run + group.rank()));
          const auto delay = [&] {
            std::this_thread::sleep_for(std::chrono::microseconds(generator() % 2000));
          };
          for (const auto dtype : dtypes) {
            // Of very different sizes, so that another order gives other bits.
            const at::Tensor x =
                rank_values(group.rank(), {50, 40}, dtype) * std::pow(7.3, group.rank() % 4);
            const at::Tensor w = rank_values(group.rank() + 9, {30, 40}, dtype),
                             b = rank_values(5, {30}, dtype);
            delay();
            const at::Tensor y = matmul_all_reduce(group, x, w, b, form.options);
            delay();
            const at::Tensor part = matmul_reduce_scatter(group, x, w, {}, form.options);
            const at::Tensor int8 =
                matmul_all_reduce(group, x, whole.columns(40 * group.rank(), 40), {}, form.options);
            const std::lock_guard lock(mutex);
            results[dtype].reduced.push_back(y.clone());
            results[dtype].reduced_int8.push_back(int8.clone());
            results[dtype].scattered[group.rank()].push_back(part.clone());
          }
        });
      }
      const auto expect_equal = [&](const std::vector<at::Tensor>& all, at::ScalarType dtype) {
        for (const at::Tensor& y : all)
          EXPECT_TRUE(at::equal(y, all[0])) << what(form, size, dtype);
      };
      for (const auto& [dtype, of_dtype] : results) {
        expect_equal(of_dtype.reduced, dtype);
        expect_equal(of_dtype.reduced_int8, dtype);
        for (const auto& [rank, parts] : of_dtype.scattered) expect_equal(parts, dtype);
      }
    }
  }
}

}  // namespace
}  // namespace braid
