// What is promised of sums: rounded once, in f32, the same bits on every rank and in every run, whoever is late.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <mutex>
#include <random>
#include <thread>

#include "braid/comm/collectives.h"
#include "braid/ops/collective_matmul.h"
#include "tests/support/ranks.h"

namespace braid {
namespace {

using test::rank_values;
using test::run_ranks;

struct Form {
  const char* name;
  MatmulOptions options;
  bool shared_memory = true;
};
const std::vector<Form> kForms{
    {"serial", {.mode = Mode::serial}},
    {"serial, native", {.mode = Mode::serial, .native = true}},
    {"serial, through f32", {.mode = Mode::serial, .native = false}},
    {"chunked", {.mode = Mode::chunked, .num_chunks = 3}},
    {"fused", {.mode = Mode::fused}},
    {"fused, native", {.mode = Mode::fused, .native = true}},
    {"fused, through f32", {.mode = Mode::fused, .native = false}},
    {"ring", {.mode = Mode::fused, .ring = true}},
    {"serial, network", {.mode = Mode::serial}, false},
    {"chunked, network", {.mode = Mode::chunked, .num_chunks = 3}, false},
};

/// Gloo's own sum of 256, 1, 1, 1 in bf16 is 256 or 260, by position; bf16 has no 257 to 259.
TEST(Sums, OfHalfPartialsAreRoundedOnce) {
  for (const int size : {2, 4, 8}) {
    for (const Form& form : kForms) {
      run_ranks(size,
                [&](const auto& group) {
                  const at::Tensor x = at::full({33, 1}, group->rank() == 0 ? 256 : 1,
                                                at::kBFloat16),
                                   w = at::ones({5, 1}, at::kBFloat16);
                  const auto expected = at::full({}, 255 + size, at::kBFloat16);
                  EXPECT_TRUE(matmul_all_reduce(*group, x, w, {}, form.options)
                                  .eq(expected)
                                  .all()
                                  .template item<bool>())
                      << form.name << " all_reduce on " << size;
                  EXPECT_TRUE(matmul_reduce_scatter(*group, x, w, {}, form.options)
                                  .eq(expected)
                                  .all()
                                  .template item<bool>())
                      << form.name << " reduce_scatter on " << size;
                  EXPECT_TRUE(all_reduce(*group, x).eq(expected).all().template item<bool>())
                      << form.name << " on " << size;
                },
                {std::chrono::seconds(30), form.shared_memory});
    }
  }
}

/// Every rank's bits, over several runs in which other ranks come late.
TEST(Sums, BitsDependOnNoDelayAndAreEqualOnAllRanks) {
  for (const int size : {2, 3, 4}) {
    for (const Form& form : kForms) {
      for (const auto dtype : {at::kFloat, at::kBFloat16}) {
        std::mutex mutex;
        std::vector<at::Tensor> reduced;  // of all ranks and runs
        std::vector<std::vector<at::Tensor>> scattered(static_cast<std::size_t>(size));
        for (int run = 0; run < 3; ++run) {
          run_ranks(size,
                    [&](const auto& group) {
                      std::mt19937 generator(static_cast<unsigned>(10 * run + group->rank()));
                      const auto delay = [&] {
                        std::this_thread::sleep_for(std::chrono::microseconds(generator() % 3000));
                      };
                      // Of very different sizes, so that another order gives other bits.
                      const at::Tensor x = rank_values(group->rank(), {50, 40}, dtype) *
                                           std::pow(7.3, group->rank()),
                                       w = rank_values(group->rank() + 9, {30, 40}, dtype);
                      delay();
                      const at::Tensor y = matmul_all_reduce(*group, x, w, {}, form.options);
                      delay();
                      const at::Tensor part = matmul_reduce_scatter(*group, x, w, {}, form.options);
                      const std::lock_guard lock(mutex);
                      reduced.push_back(y.clone());
                      scattered[static_cast<std::size_t>(group->rank())].push_back(part.clone());
                    },
                    {std::chrono::seconds(30), form.shared_memory});
        }
        for (const at::Tensor& y : reduced)
          EXPECT_TRUE(at::equal(y, reduced[0])) << form.name << " on " << size;
        for (const auto& of_rank : scattered)
          for (const at::Tensor& part : of_rank)
            EXPECT_TRUE(at::equal(part, of_rank[0])) << form.name << " on " << size;
      }
    }
  }
}

}  // namespace
}  // namespace braid
