// A rank that runs operations again and again: counts what they send, and is what tests of faults kill.
// Usage: braid_test_operation count COUNT   each so many times: its name, and the bytes that left eth0
//        braid_test_operation loop OPERATION TIMEOUT_S READY   one without end; a file READY.<rank> after ten
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <cstdio>
#include <fstream>
#include <map>

#include "braid/comm/collectives.h"
#include "braid/comm/join.h"
#include "braid/core/check.h"
#include "braid/ops/collective_matmul.h"
#include "braid/ops/reference.h"
#include "tests/support/ranks.h"

namespace braid {
namespace {

constexpr std::int64_t kRows = 1200, kFeatures = 256;
const MatmulOptions kOptions{.mode = Mode::chunked, .num_chunks = 4};

/// What every rank has, of its own values.
struct Inputs {
  explicit Inputs(const Group& group)
      : whole(test::rank_values(group.rank(), {kRows, kFeatures})),
        shard(test::rank_values(group.rank(), {kRows / group.size(), kFeatures})),
        weight(test::rank_values(group.rank() + 20, {kFeatures, kFeatures})) {}
  at::Tensor whole, shard, weight;
};

at::Tensor sum_of_wholes(const Group& group, const Inputs& in) {
  at::Tensor sum = at::zeros_like(in.whole);
  for (int rank = 0; rank < group.size(); ++rank) sum += test::rank_values(rank, in.whole.sizes());
  return sum;
}

using Operation = at::Tensor (*)(const Group&, const Inputs&);
struct Case {
  Operation run, expected;
};

const std::map<std::string, Case> kCases{
    {"all_gather",
     {[](const Group& group, const Inputs& in) { return all_gather(group, in.shard); },
      [](const Group& group, const Inputs& in) {
        std::vector<at::Tensor> shards;
        for (int rank = 0; rank < group.size(); ++rank)
          shards.push_back(test::rank_values(rank, in.shard.sizes()));
        return at::cat(shards);
      }}},
    {"all_reduce",
     {[](const Group& group, const Inputs& in) { return all_reduce(group, in.whole); },
      sum_of_wholes}},
    {"all_to_all",
     {[](const Group& group, const Inputs& in) {
        const auto rows = split_rows(kRows, group.size());
        return start_all_to_all(group, in.whole, rows, rows).wait();
      },
      [](const Group& group, const Inputs& in) {
        std::vector<at::Tensor> parts;
        for (int rank = 0; rank < group.size(); ++rank)
          parts.push_back(test::rank_values(rank, in.whole.sizes())
                              .tensor_split(group.size())[static_cast<std::size_t>(group.rank())]);
        return at::cat(parts);
      }}},
    {"broadcast",
     {[](const Group& group, const Inputs& in) { return broadcast(group, in.whole, 0); },
      [](const Group&, const Inputs& in) { return test::rank_values(0, in.whole.sizes()); }}},
    {"reduce_scatter",
     {[](const Group& group, const Inputs& in) { return reduce_scatter(group, in.whole); },
      [](const Group& group, const Inputs& in) {
        return sum_of_wholes(group, in).tensor_split(
            group.size())[static_cast<std::size_t>(group.rank())];
      }}},
    {"all_gather_matmul",
     {[](const Group& group, const Inputs& in) {
        return all_gather_matmul(group, in.shard, in.weight, {}, kOptions);
      },
      [](const Group& group, const Inputs& in) {
        return reference::all_gather_matmul(group, in.shard, in.weight);
      }}},
    {"matmul_reduce_scatter",
     {[](const Group& group, const Inputs& in) {
        return matmul_reduce_scatter(group, in.whole, in.weight, {}, kOptions);
      },
      [](const Group& group, const Inputs& in) {
        return reference::matmul_reduce_scatter(group, in.whole, in.weight);
      }}},
    {"matmul_all_reduce",
     {[](const Group& group, const Inputs& in) {
        return matmul_all_reduce(group, in.whole, in.weight, {}, kOptions);
      },
      [](const Group& group, const Inputs& in) {
        return reference::matmul_all_reduce(group, in.whole, in.weight);
      }}},
    {"all_gather_matmul_backward",
     {[](const Group& group, const Inputs& in) {
        return all_gather_matmul_backward(group, in.shard, in.weight, in.whole, true,
                                          at::empty_like(in.weight), false, {}, kOptions);
      },
      [](const Group& group, const Inputs& in) {
        return reference::all_gather_matmul(group, in.shard, in.weight.t());
      }}},
};

void check(const Group& group, const std::string& name, const Inputs& in) {
  const Case& c = kCases.at(name);
  BRAID_CHECK(at::allclose(c.run(group, in), c.expected(group, in), 1e-4, 1e-4), name,
              ": wrong values");
}

std::int64_t sent_bytes() {
  std::int64_t bytes = -1;
  std::ifstream("/sys/class/net/eth0/statistics/tx_bytes") >> bytes;
  return bytes;
}

void count(const Group& group, const Place& place, const Inputs& in, int repeats) {
  for (const auto& [name, c] : kCases) {
    check(group, name, in);
    barrier(group);
    const std::int64_t before = sent_bytes();
    barrier(group);  // nobody has begun before it was read
    for (int i = 0; i < repeats; ++i) (void)c.run(group, in);
    barrier(group);
    if (place.local_rank == 0) fmt::print("{} {}\n", name, sent_bytes() - before);
    std::fflush(stdout);
    barrier(group);
  }
}

[[noreturn]] void loop(const Group& group, const Inputs& in, const std::string& name,
                       const std::string& ready) {
  check(group, name, in);
  for (int i = 1;; ++i) {
    (void)kCases.at(name).run(group, in);
    if (i == 10) std::ofstream(fmt::format("{}.{}", ready, group.rank()));
  }
}

void run(const std::vector<std::string>& words) {
  at::set_num_threads(1);
  const Place place = place_from_environment();
  const std::chrono::seconds timeout(words.size() > 2 ? std::stoi(words[2]) : 60);
  const auto group = Group::create(join_run(place, timeout), "run", place.rank, place.world_size,
                                   {.timeout = timeout, .store_rank = place.store_rank()});
  const Inputs in(*group);
  if (words.at(0) == "count")
    count(*group, place, in, std::stoi(words.at(1)));
  else
    loop(*group, in, words.at(1), words.at(3));
}

}  // namespace
}  // namespace braid

int main(int argc, char** argv) {
  try {
    braid::run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", braid::text_of(error).c_str());
    return 1;
  }
}
