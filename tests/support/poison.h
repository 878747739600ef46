// NaN in the slots of a group, so that what nobody writes shows.
#pragma once

#include <cstring>
#include <vector>

#include "braid/comm/group.h"
#include "braid/comm/shared_memory.h"

namespace braid::test {

/// Fills the slots of this rank with NaN (all bits set, in every dtype).
inline void poison(const Group& group) {
  if (group.memory() == nullptr) return;
  constexpr std::size_t kBytes = 64 << 10;
  std::vector<SharedMemory::Lease> leases;
  while (group.memory()->num_in_flight() < SharedMemory::kInFlight) {
    Header header;
    std::strcpy(header.op, "poison");
    leases.push_back(group.memory()->start(header, kBytes));
    std::memset(leases.back().slot(group.rank()), 0xff, kBytes);
  }
}

/// The group, for an operation that finds NaN in its slot whatever ran before.
inline const Group& poisoned(const Group& group) {
  poison(group);
  return group;
}

}  // namespace braid::test
