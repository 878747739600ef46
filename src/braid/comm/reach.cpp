// Trial connections between the ranks of a run.
#include "braid/comm/reach.h"

#include <fmt/format.h>

#include <set>

#include "braid/comm/join.h"

namespace braid {
namespace {

/// Why this rank does not reach another; empty: it does.
std::string connect_error(const Place& place, int peer, const std::string& address, int port,
                          Deadline deadline) {
  try {
    (void)connect_tcp(address, port, deadline);
    return "";
  } catch (const c10::DistBackendError& error) {
    return fmt::format("rank {} can't reach rank {} at {}:{}: {}. HINT: {}", place.rank, peer,
                       address, port, error.what_without_backtrace(),
                       is_loopback(address)
                           ? "that is on its own host, as LOCAL_WORLD_SIZE says of all ranks"
                           : "another network by --interface or BRAID_INTERFACE, or a firewall");
  }
}

}  // namespace

void check_reach(const Place& place, const c10::intrusive_ptr<c10d::Store>& store) {
  const auto key = [](const char* what, int rank) {
    return fmt::format("braid/{}/{}", what, rank);
  };
  std::string error, own;
  Descriptor listener;
  try {
    const auto address = listening_address(place, store);
    listener = listen_tcp(0, is_loopback(address) ? Listening::loopback
                                                  : Listening::everywhere);  // nobody has to accept
    own = fmt::format("{} {}", port_of(listener), address);
  } catch (const c10::DistBackendError& failure) {
    error = failure.what_without_backtrace();
  }
  store->set(key("listens", place.rank), own);
  std::set<std::string> seen{};
  for (int peer = 0; peer < place.world_size; ++peer) {
    const std::string where = said_by(place, *store, key("listens", peer), peer);
    const std::string theirs = where.substr(where.find(' ') + 1);
    if (peer == place.rank || where.empty() || !error.empty() || !seen.insert(theirs).second)
      continue;
    // Before the others cease to wait for what this rank finds.
    const auto deadline = std::chrono::steady_clock::now() + store->getTimeout() * 3 / 4;
    error = connect_error(place, peer, theirs, std::stoi(where), deadline);
  }
  store->set(key("reaches", place.rank), error);
  std::string first;
  for (int rank = 0; rank < place.world_size; ++rank) {
    const std::string said = said_by(place, *store, key("reaches", rank), rank);
    if (first.empty()) first = said;
  }
  if (first.empty()) return;
  part(place, *store, "reach", place.world_size);
  C10_THROW_ERROR(DistBackendError, first);
}

}  // namespace braid
