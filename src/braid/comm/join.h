// How the ranks of a run meet: at a store, where they compare what they are, before their first message.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "braid/comm/place.h"
#include "braid/comm/sockets.h"

namespace braid {

/// This rank's way into its run: connects to the store, waits until all ranks have come, checks that they
/// are the same braid on the same libtorch and reach each other, and divides the cores of a host among its ranks.
/// Rank 0 warns of ranks whose CPUs have other instruction sets.
///   Order    collective over the run's ranks, once; before the thread starts others
///   Errors   as connect_store's, check_same's and check_reach's
c10::intrusive_ptr<c10d::Store> join_run(const Place& place, std::chrono::milliseconds timeout);

/// Connects to the store where the run's ranks meet; rank 0 hosts it where no launcher does. In
/// memory for a single rank without a launcher. Waits for a store that comes later.
///   Errors   ValueError: BRAID_INTERFACE is not of this host, or reaches no other. DistBackendError within
///            `timeout`, naming address and port: the store can't be reached or hosted, what answers is no
///            store, it is another run's, or this rank is there already
c10::intrusive_ptr<c10d::Store> connect_store(const Place& place,
                                              std::chrono::milliseconds timeout);

/// Waits until all ranks have come here, and compares what they bring.
///   topic    another one for each comparison of a run
///   facts    name -> value, which must be the same on all ranks
///   Order    collective over the run's ranks
///   Errors   the same on every rank: ValueError naming all facts in which rank 0 and the first other one differ;
///            DistBackendError naming the ranks that did not come within `timeout`
void check_same(const Place& place, c10d::Store& store, const std::string& topic,
                const nlohmann::json& facts, std::chrono::milliseconds timeout);

/// The address of this host, in numbers, on which this rank's connections from other ranks come in: that of
/// BRAID_INTERFACE, else loopback where all ranks are on one host, else the one by which this host reaches
/// MASTER_ADDR - on MASTER_ADDR's own host, whose name may stand for loopback there: another rank's host, where
/// there is one.
///   store    of connect_store, or of a group; all ranks have come
///   Errors   DistBackendError where no address leads there
std::string listening_address(const Place& place, const c10::intrusive_ptr<c10d::Store>& store);

/// Before ranks throw what all of them know from the store: rank 0, which may host it, waits (2 s at most) until the
/// others have called this, too.
///   num_ranks   that call it; rank 0 needs it
void part(const Place& place, c10d::Store& store, const std::string& topic, std::int64_t num_ranks);

/// What a rank has set, or will set, at a key of the store.
///   Errors   DistBackendError: naming the rank, where that is not there within the store's time-out; the store is gone
std::string said_by(const Place& place, c10d::Store& store, const std::string& key, int rank);

/// Where a store says which run it is of.
inline constexpr const char* kRunKey = "braid/run";

/// Hosts the store of a run at this port of all addresses. It lives as long as what is returned.
///   Errors  DistBackendError naming the port and, where it is taken, what is there
c10::intrusive_ptr<c10d::Store> host_store(int port, const std::string& run);

/// A client of the store that listens there.
///   Errors   DistBackendError: why it can't be reached by the deadline, or that what answers is no store
c10::intrusive_ptr<c10d::Store> open_store(const std::string& address, int port, Deadline deadline);

}  // namespace braid
