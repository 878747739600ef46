// Whether the ranks of a run reach each other's addresses, found out before their process groups need it.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "braid/comm/place.h"

namespace braid {

/// Connects to one rank of every address that ranks listen on.
///   store    of connect_store
///   Order    collective over the run's ranks
///   Errors   DistBackendError, the same on every rank: which rank does not reach which within the store's time-out,
///            at what address and why; ranks that did not come
void check_reach(const Place& place, const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace braid
