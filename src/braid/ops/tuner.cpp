// Measures and remembers choices.
#include "braid/ops/tuner.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <vector>

#include "braid/comm/collectives.h"
#include "braid/core/check.h"
#include "braid/core/log.h"
#include "braid/core/trace.h"

namespace braid::tuner {
namespace {

constexpr int kRounds = 5;
// Below this many rows a rank, cutting the matmul costs more than it hides (measured:
// docs/design.md).
constexpr std::int64_t kFewRows = 128;

thread_local std::map<std::string, int> table;
thread_local bool live = true;

std::string text_of(const Group& group, const Key& key) {
  return fmt::format("{} {} {} {} {} {} {}", key.op, key.m, key.n, key.k, c10::toString(key.dtype),
                     group.size(), group.memory() != nullptr ? "host" : "network");
}

int measure(const Group& group, const std::vector<int>& candidates,
            const std::function<void(int)>& trial) {
  std::vector<std::vector<double>> seconds(candidates.size());
  for (int round = 0; round < 1 + kRounds; ++round) {  // the first one warms up
    for (std::size_t c = 0; c < candidates.size(); ++c) {
      barrier(group);
      const auto begin = std::chrono::steady_clock::now();
      trial(candidates[c]);
      const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
      if (round > 0) seconds[c].push_back(elapsed.count());
    }
  }
  at::Tensor slowest =
      at::empty({static_cast<std::int64_t>(candidates.size()), kRounds}, at::kDouble);
  for (std::size_t c = 0; c < candidates.size(); ++c)
    for (int round = 0; round < kRounds; ++round)
      slowest[static_cast<std::int64_t>(c)][round] = seconds[c][static_cast<std::size_t>(round)];
  slowest = all_reduce(group, slowest, ReduceOp::max);
  return candidates[static_cast<std::size_t>(
      std::get<0>(slowest.median(1)).argmin().item<std::int64_t>())];
}

int by_rule(const Group& group, const Key& key) {
  if (key.m < kFewRows * group.size()) return 1;
  return group.memory() != nullptr ? 0 : 4;
}

}  // namespace

int choose(const Group& group, const Key& key, const MatmulOptions& options,
           const std::function<void(int)>& trial) {
  switch (options.mode) {
    case Mode::serial:
      return 1;
    case Mode::chunked:
      BRAID_CHECK(options.num_chunks >= 1, key.op, ": num_chunks is ", options.num_chunks,
                  ", at least 1 is needed");
      return options.num_chunks;
    case Mode::fused: {
      if (group.memory() != nullptr) return 0;
      static std::once_flag said;
      std::call_once(said, [&] {
        warn(fmt::format(
            "{}: mode fused needs all ranks of group {} on one host with shared memory; runs "
            "chunked instead",
            key.op, group.name()));
      });
      return std::max(options.num_chunks, 2);
    }
    case Mode::automatic:
      break;
  }
  const std::string text = text_of(group, key);
  if (const auto found = table.find(text); found != table.end()) return found->second;
  const std::vector<int> candidates =
      group.memory() != nullptr ? std::vector<int>{1, 0, 2} : std::vector<int>{1, 2, 4, 8};
  const int chosen = live ? measure(group, candidates, trial) : by_rule(group, key);
  return table[text] = chosen;
}

void allow_live(bool on) { live = on; }

nlohmann::json choices() { return nlohmann::json(table); }

void set_choices(const nlohmann::json& choices) {
  BRAID_CHECK(choices.is_object(), "tuner choices are ", choices.type_name(),
              ", expected an object");
  for (const auto& [key, value] : choices.items()) {
    BRAID_CHECK(value.is_number_integer() && value.get<int>() >= 0, "tuner choice of '", key,
                "' is ", value.dump(), ", expected a number of chunks");
    table[key] = value.get<int>();
  }
}

}  // namespace braid::tuner
