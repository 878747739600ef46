// The pieces of starting a rank's process on this host: its store's address, its environment, its program.
// Used by the launcher and by the tests that have ranks as processes.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <signal.h>
#include <sys/types.h>

#include <map>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "braid/comm/place.h"
#include "braid/comm/sockets.h"

namespace braid {

/// A store for ranks: they can connect before start().
class HostedStore {
 public:
  /// At a free loopback port, for ranks of this host. Errors: DistBackendError.
  HostedStore();
  /// At this port of all addresses. Errors: DistBackendError naming the port, also where it is taken.
  explicit HostedStore(int port);

  int port() const { return port_of(socket_); }
  /// Begins to serve, with a thread of this process; once only. The store lives as long as what is returned.
  c10::intrusive_ptr<c10d::Store> start();

 private:
  Descriptor socket_;
};

using Environment = std::map<std::string, std::string>;

/// This process's environment, with a rank's place as torchrun would set it; the store is hosted.
Environment environment_of_rank(const Place& place);

/// The place of one of `num_ranks` ranks of this host, whose store is at a loopback port.
Place place_on_this_host(int rank, int num_ranks, int port);

/// Starts `program` (sought in PATH) in a process group of its own; it ends when the calling thread does.
///   mask     its blocked signals
///   output   where its standard output and error go; -1: where this process's go
///   Errors   ValueError when the program can't be run
pid_t spawn(std::string program, std::vector<std::string> arguments, const Environment& environment,
            const sigset_t& mask, int output = -1);

}  // namespace braid
