// Messages over a TCP connection: JSON, one a line.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "braid/comm/sockets.h"

namespace braid {

class LineSocket {
 public:
  LineSocket() = default;
  /// Takes the connection. A peer whose host does not answer for `timeout` counts as gone.
  LineSocket(Descriptor socket, std::chrono::milliseconds timeout);

  bool is_open() const { return socket_.get() >= 0; }
  int socket() const { return socket_.get(); }
  /// The other end's address, in numbers.
  const std::string& address() const { return address_; }

  /// Nothing where the peer is gone.
  void send(const nlohmann::json& message) const;
  /// A message that has come; empty: none, or the peer is gone, and the wire is closed.
  std::optional<nlohmann::json> next();
  /// Waits for one.
  std::optional<nlohmann::json> wait(Deadline deadline);
  /// Gives the peer up.
  void close() { socket_ = Descriptor(); }
  /// Sends no more, and waits until the peer is gone.
  void finish(Deadline deadline);

 private:
  Descriptor socket_;
  std::string address_, unread_;
};

}  // namespace braid
