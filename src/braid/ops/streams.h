// How a plan's streams are made: fused (comm/streams.h), or from split-phase collectives by chunks, in flight
// while the previous chunk is multiplied; 1 chunk is the serial form.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "braid/comm/streams.h"
#include "braid/ops/plan.h"

namespace braid {

/// Between hosts a plan of several chunks is fused, too: rows are cut in so many tiles.
inline bool is_fused(const Group& group, const Plan& plan) {
  if (group.uses_engine()) return false;
  return plan.num_chunks == 0 || (plan.num_chunks > 1 && !group.on_one_host());
}

/// Starts gathering x_shard [t_r, k] over `group` (more than one rank).
///   rows   t_r of every rank, or empty
///   name   of the operation, in errors and traces
std::unique_ptr<GatherStream> make_gather_stream(const Group& group, const char* name,
                                                 const at::Tensor& x_shard, const Plan& plan,
                                                 std::vector<std::int64_t> rows);

std::unique_ptr<ReduceStream> make_reduce_stream(const Group& group, const char* name,
                                                 ReduceShape shape, const Plan& plan);

}  // namespace braid
