// Makes the groups of a run.
#include "braid/comm/mesh.h"

#include <fmt/format.h>

#include <numeric>
#include <set>

#include "braid/comm/shared_memory.h"
#include "braid/core/check.h"

namespace braid {

Mesh make_mesh(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size, int tp,
               GroupOptions options) {
  BRAID_CHECK(tp >= 1 && world_size % tp == 0, "tensor-parallel size ", tp,
              " does not divide the number of ranks, ", world_size);
  Mesh mesh;
  mesh.store = store;
  mesh.world = Group::create(store, "world", rank, world_size, options);
  const int dp = world_size / tp;
  // World rank 0, where it hosts the store, is rank 0 of its groups.
  const auto of_group = [&](int first) {
    GroupOptions in_group = options;
    if (first != options.store_rank) in_group.store_rank = -1;
    return in_group;
  };
  // One axis that spans all ranks is the world: one region, one set of connections.
  mesh.tp = dp == 1 ? mesh.world
                    : Group::create(store, fmt::format("tp{}", rank / tp), rank % tp, tp,
                                    of_group(rank / tp * tp));
  mesh.dp = tp == 1 ? mesh.world
                    : Group::create(store, fmt::format("dp{}", rank % tp), rank / tp, dp,
                                    of_group(rank % tp));
  return mesh;
}

std::size_t Mesh::shared_memory_bytes() const {
  std::set<SharedMemory*> all;  // groups may be one
  for (const auto& group : {world, tp, dp})
    if (group->memory() != nullptr) all.insert(group->memory());
  return std::transform_reduce(all.begin(), all.end(), std::size_t{0}, std::plus<>(),
                               [](const SharedMemory* memory) { return memory->bytes(); });
}

}  // namespace braid
