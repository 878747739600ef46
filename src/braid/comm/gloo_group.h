// Makes a Gloo process group.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace braid {

/// Connects the ranks over TCP. Collective. Listens on listening_address() of the environment's place.
///   in_turn   its threads interrupt no other ones, see NOTE [batch] in gloo_group.cpp
/// Errors: DistBackendError when a peer does not come within the time-out, or listening_address()'s.
c10::intrusive_ptr<c10d::Backend> make_gloo_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                  int rank, int size,
                                                  std::chrono::milliseconds timeout, bool in_turn);

}  // namespace braid
