// Every environment variable that braid reads: type, default, meaning; read once per process.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>

namespace braid {

struct Env {
  /// BRAID_TIMEOUT_S (60): longest wait for a peer, in any operation, in seconds.
  std::chrono::milliseconds timeout{60'000};
  /// BRAID_SHARED_MEMORY (1): 0 sends everything through the process group, even inside a host.
  bool shared_memory = true;
  /// BRAID_SLOT_BYTES (16 GiB): the most that an operation in flight can hold, in whole pages.
  /// Address space only; memory is taken when it is first needed.
  std::size_t slot_bytes = std::size_t{16} << 30;
  /// BRAID_SPIN (2000): polls of a flag before the waiter sleeps; 0 always sleeps.
  int spin = 2000;
  /// BRAID_INTERFACE (""): network interface or address of this host for messages between hosts; empty: loopback where
  /// all ranks are on one host, else the one towards MASTER_ADDR.
  std::string interface;
};

/// The process's settings. Errors: ValueError naming the variable and its text when one does not parse.
const Env& env();

}  // namespace braid
