// Decides whether this process starts ranks or is one.
#include <cstring>
#include <fstream>
#include <iterator>

#include "braid/cli/commands.h"
#include "braid/comm/launch.h"
#include "braid/core/check.h"
#include "braid/core/env.h"
#include "braid/core/log.h"
#include "braid/train/run.h"

namespace braid::cli {

std::optional<int> run_on_ranks(std::optional<int> num_ranks) {
  (void)env();  // a wrong variable is said before ranks start
  const Place place = place_from_environment();
  if (num_ranks) BRAID_CHECK(*num_ranks >= 1, "--nproc is ", *num_ranks, ", expected at least 1");
  if (!place.source.empty()) {
    BRAID_CHECK(!num_ranks || *num_ranks == place.local_world_size, "--nproc is ",
                num_ranks.value_or(0), ", but ", place.source, " has started ",
                place.local_world_size, " ranks on this host (LOCAL_WORLD_SIZE)");
    return std::nullopt;
  }
  if (num_ranks.value_or(1) == 1) return std::nullopt;
  return launch_ranks(*num_ranks, command_line());
}

std::optional<int> run_on_ranks(TrainConfig& config, const Place& place, bool needs_data) {
  const auto nproc =
      config.nproc > 0 ? std::optional(static_cast<int>(config.nproc)) : std::nullopt;
  const auto warnings =
      validate(config, place.source.empty() ? nproc.value_or(1) : place.world_size, needs_data);
  speaks = place.rank == 0;
  if (!place.launched_by_itself) {  // else the launcher has checked and warned already
    if (needs_data) check_inputs(config);
    for (const auto& text : warnings) warn(text);
  }
  return run_on_ranks(nproc);
}

std::vector<std::string> command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string all{std::istreambuf_iterator<char>(file), {}};
  std::vector<std::string> words;
  for (std::size_t i = 0; i < all.size(); i = all.find('\0', i) + 1)
    words.emplace_back(all.c_str() + i);
  words.erase(words.begin());
  return words;
}

}  // namespace braid::cli
