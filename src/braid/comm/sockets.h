// TCP at the start of a run: where this host listens, how it reaches another, by which of its addresses.
#pragma once

#include <chrono>
#include <string>

#include "braid/core/descriptor.h"

namespace braid {

using Deadline = std::chrono::steady_clock::time_point;

enum class Listening { loopback, everywhere };

/// Listens on a port; 0: a free one. Errors: DistBackendError naming the port and the system's reason.
Descriptor listen_tcp(int port, Listening where);
/// The port that a socket is bound to.
int port_of(const Descriptor& socket);
/// The address of a connection's other end, in numbers.
std::string peer_address(const Descriptor& socket);

/// Connects; tries again until the deadline, as a host may still be booting and its program not be listening yet.
///   Errors  DistBackendError at the deadline: the last reason, without the address
Descriptor connect_tcp(const std::string& host, int port, Deadline deadline);

/// The address of this host by which it reaches `host` (a name or an address); empty where it can't.
std::string address_towards(const std::string& host);
/// Whether an address in numbers reaches this host only.
bool is_loopback(const std::string& address);
/// The address of a network interface or a name of this host, in numbers; empty where it is neither.
std::string own_address(const std::string& interface);

/// Milliseconds until the deadline, for poll(2); 0 after it.
int left_ms(Deadline deadline);

}  // namespace braid
