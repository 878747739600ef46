// Sends and receives lines of JSON.
#include "braid/comm/line_socket.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <string_view>

namespace braid {
namespace {

constexpr std::size_t kLongest = 1 << 20;  // of a line

void notice_silence(int socket, std::chrono::milliseconds timeout) {
  constexpr int kOn = 1, kProbes = 4;
  const auto seconds = std::max(static_cast<int>(timeout.count() / 1000), 2);
  const int idle = seconds / 2, interval = std::max(seconds / 2 / kProbes, 1);
  const auto silent_ms = static_cast<unsigned>(timeout.count());
  ::setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &kOn, sizeof kOn);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPCNT, &kProbes, sizeof kProbes);
  ::setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &silent_ms, sizeof silent_ms);
}

}  // namespace

LineSocket::LineSocket(Descriptor socket, std::chrono::milliseconds timeout)
    : socket_(std::move(socket)), address_(peer_address(socket_)) {
  notice_silence(socket_.get(), timeout);
}

void LineSocket::send(const nlohmann::json& message) const {
  const std::string line =
      message.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  for (std::string_view rest = line; is_open() && !rest.empty();) {
    const auto sent = ::send(socket_.get(), rest.data(), rest.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return;  // its end is read, too
    rest.remove_prefix(static_cast<std::size_t>(sent));
  }
}

std::optional<nlohmann::json> LineSocket::next() {
  while (is_open()) {
    if (const auto end = unread_.find('\n'); end != std::string::npos) {
      auto message =
          nlohmann::json::parse(unread_.begin(), unread_.begin() + static_cast<std::ptrdiff_t>(end),
                                nullptr, /*allow_exceptions=*/false);
      unread_.erase(0, end + 1);
      if (message.is_object()) return message;
      break;
    }
    char bytes[4096];
    const auto received = ::recv(socket_.get(), bytes, sizeof bytes, MSG_DONTWAIT);
    if (received < 0 && errno == EINTR) continue;
    if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return std::nullopt;
    if (received <= 0 || unread_.size() > kLongest) break;
    unread_.append(bytes, static_cast<std::size_t>(received));
  }
  socket_ = Descriptor();
  return std::nullopt;
}

std::optional<nlohmann::json> LineSocket::wait(Deadline deadline) {
  while (true) {
    if (auto message = next()) return message;
    pollfd entry{socket_.get(), POLLIN, 0};
    const int left = left_ms(deadline);
    if (!is_open() || left == 0) return std::nullopt;
    ::poll(&entry, 1, left);
  }
}

void LineSocket::finish(Deadline deadline) {
  if (is_open()) ::shutdown(socket_.get(), SHUT_WR);
  while (is_open() && left_ms(deadline) > 0) (void)wait(deadline);
}

}  // namespace braid
