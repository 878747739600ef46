// Times several ways to do one thing, in turn, on all ranks of a group.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <vector>

#include "braid/comm/group.h"

namespace braid {

/// Runs every way `rounds` times, from a barrier each time; in every round in another order, so that
/// none always finds the caches that the same one left.
///   calls   of a way in a row, for those that are too short to be timed alone
///   Order   collective
///   returns seconds of one call, of the slowest rank: [ways, rounds], f64, the same on all ranks
at::Tensor time_interleaved(const Group& group, const std::vector<std::function<void()>>& ways,
                            int rounds, int calls);

}  // namespace braid
