// Ranks as threads of the test process: one mapping of the shared memory, an in-memory store,
// unique group names.
#pragma once

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "braid/comm/group.h"

namespace braid::test {

using HostNumbers = std::vector<int>;  // of each rank; empty: one host
inline HostNumbers apart(int size) {
  HostNumbers hosts(static_cast<std::size_t>(size));
  std::iota(hosts.begin(), hosts.end(), 0);
  return hosts;
}
inline std::string name_of(const HostNumbers& hosts) {
  return hosts.empty() ? "" : fmt::format(" on hosts {}", fmt::join(hosts, ""));
}
inline GroupOptions on_hosts(HostNumbers hosts,
                             std::chrono::seconds timeout = std::chrono::seconds(30)) {
  return {timeout, true, std::move(hosts)};
}

/// Runs fn(group) on `num_ranks` threads, each with its rank's Group; rethrows the first exception.
/// Assertions inside fn throw or use EXPECT_. One ATen thread per rank.
inline void run_ranks(int num_ranks, const std::function<void(const std::shared_ptr<Group>&)>& fn,
                      GroupOptions options = {}) {
  static std::atomic<int> runs{0};
  const std::string name = "test" + std::to_string(runs++);
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::exception_ptr first;
  std::atomic_flag failed;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        at::set_num_threads(1);
        fn(Group::create(store, name, rank, num_ranks, options));
      } catch (...) {
        if (!failed.test_and_set()) first = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

/// A tensor whose every value differs by rank and index, of magnitude about one.
inline at::Tensor rank_values(int rank, at::IntArrayRef shape, at::ScalarType dtype = at::kFloat) {
  const auto n = c10::multiply_integers(shape);
  return at::sin(at::arange(n, at::kDouble) * 0.37 + 1.7 * rank + 0.1).reshape(shape).to(dtype);
}

/// Small integers, so that f32 sums are exact.
inline at::Tensor rank_integers(int rank, at::IntArrayRef shape,
                                at::ScalarType dtype = at::kFloat) {
  const auto n = c10::multiply_integers(shape);
  return (at::remainder(at::arange(n, at::kLong) * 7 + 3 * rank, 11) - 5).reshape(shape).to(dtype);
}

}  // namespace braid::test
