// The groups of a run: tensor-parallel ranks are neighbours, data-parallel ones are tp apart.
#pragma once

#include <memory>

#include "braid/comm/group.h"

namespace braid {

struct Mesh {
  std::shared_ptr<Group> world, tp, dp;
  c10::intrusive_ptr<c10d::Store> store = {};  // where their ranks met

  /// Bytes of shared memory that this rank's groups have needed at most.
  std::size_t shared_memory_bytes() const;
};

/// Makes the groups. Collective over all ranks; tp must divide world_size.
///   options  store_rank: rank 0 or -1
Mesh make_mesh(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size, int tp,
               GroupOptions options = {});

}  // namespace braid
