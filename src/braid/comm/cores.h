// The cores of a host, divided among its ranks.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "braid/comm/place.h"

namespace braid {

struct Core {
  int node = 0;               // of memory (NUMA)
  int package = 0, core = 0;  // of the physical core, which others may be threads of
  int number = 0;             // as the kernel counts

  auto operator<=>(const Core&) const = default;
};

/// Those that this process may use, by affinity. Empty where the kernel does not say.
std::vector<Core> allowed_cores();

/// The share of rank `index` of `sharers`: siblings of a physical core together; within one node of memory where that
/// takes from no rank more than a fifth of an even share, else even shares. Where there are more ranks than cores, one
/// core that others have, too.
///   cores  at least one
std::vector<Core> share_of(std::vector<Core> cores, std::size_t sharers, std::size_t index);

/// Divides the cores that this rank is allowed to use with the ranks that are allowed the very same
/// ones (affinity), and gives ATen as many threads. A launcher that has bound each rank to cores of
/// its own is thus left as it is.
///   Order    collective over the store's ranks, once per store; before the thread starts others
///   Errors   as said_by's (comm/join.h)
void share_cores(const Place& place, c10d::Store& store);

}  // namespace braid
