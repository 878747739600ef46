// Divides the allowed cores by affinity.
#include "braid/comm/cores.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "braid/comm/join.h"

namespace braid {
namespace {

Core core_of(int number) {
  Core core{.core = number, .number = number};
  const auto folder = fmt::format("/sys/devices/system/cpu/cpu{}/", number);
  std::ifstream(folder + "topology/physical_package_id") >> core.package;
  std::ifstream(folder + "topology/core_id") >> core.core;
  std::error_code none;  // a kernel without nodes
  for (const auto& entry : std::filesystem::directory_iterator(folder, none)) {
    const std::string name = entry.path().filename();
    if (name.starts_with("node"))
      std::from_chars(name.data() + 4, name.data() + name.size(), core.node);
  }
  return core;
}

using Cores = std::vector<Core>;

/// Part `index` of `parts`, none empty while there are cores.
Cores part_of(const Cores& cores, std::size_t parts, std::size_t index) {
  const std::size_t begin = index * cores.size() / parts, end = (index + 1) * cores.size() / parts;
  if (begin == end) return {cores[begin]};
  return {cores.begin() + static_cast<std::ptrdiff_t>(begin),
          cores.begin() + static_cast<std::ptrdiff_t>(end)};
}

}  // namespace

std::vector<Core> allowed_cores() {
  cpu_set_t set;
  std::vector<Core> cores;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return cores;
  for (int number = 0; number < CPU_SETSIZE; ++number) {
    if (CPU_ISSET(number, &set)) cores.push_back(core_of(number));
  }
  return cores;
}

Cores share_of(Cores cores, std::size_t sharers, std::size_t index) {
  std::sort(cores.begin(), cores.end());
  // Each node is given ranks by its part of the cores, rounded; these ones share its cores.
  const auto ranks_before = [&](std::size_t cores_before) {
    return (2 * cores_before * sharers + cores.size()) / (2 * cores.size());
  };
  Cores mine;
  for (std::size_t begin = 0, end; begin < cores.size(); begin = end) {
    end = begin;
    while (end < cores.size() && cores[end].node == cores[begin].node) ++end;
    const std::size_t first = ranks_before(begin), ranks = ranks_before(end) - first;
    const std::size_t least = ranks == 0 ? 0 : (end - begin) / ranks;
    if (5 * least * sharers < 4 * cores.size()) return part_of(cores, sharers, index);
    if (index >= first && index < first + ranks)
      mine = part_of({cores.begin() + static_cast<std::ptrdiff_t>(begin),
                      cores.begin() + static_cast<std::ptrdiff_t>(end)},
                     ranks, index - first);
  }
  return mine;
}

void share_cores(const Place& place, c10d::Store& store) {
  Cores cores = allowed_cores();
  if (cores.empty()) return;
  if (place.world_size > 1) {
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    const auto key = [](int rank) { return fmt::format("braid/cores/{}", rank); };
    std::vector<int> numbers;
    for (const Core& core : cores) numbers.push_back(core.number);
    const auto mine = fmt::format("{} {}", boot, fmt::join(numbers, ","));
    store.set(key(place.rank), mine);
    std::size_t sharers = 0, index = 0;
    for (int rank = 0; rank < place.world_size; ++rank) {
      if (said_by(place, store, key(rank), rank) != mine) continue;
      if (rank == place.rank) index = sharers;
      ++sharers;
    }
    cores = share_of(cores, sharers, index);
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const Core& core : cores) CPU_SET(core.number, &set);
    TORCH_INTERNAL_ASSERT(sched_setaffinity(0, sizeof set, &set) == 0, std::strerror(errno));
  }
  at::set_num_threads(static_cast<int>(cores.size()));
}

}  // namespace braid
