// Listens, connects and asks the system for its own addresses.
#include "braid/comm/sockets.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <functional>
#include <memory>
#include <string_view>
#include <thread>

namespace braid {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

constexpr auto kRetry = 200ms;
constexpr auto kAttempt = 5s;  // of one address, where a name has several

/// Calls `use` with each address of the host until one returns true. Gives the reason why the name has none.
std::string for_each_address(const std::string& host, int port, int type,
                             const std::function<bool(const addrinfo&)>& use) {
  addrinfo hints{};
  hints.ai_socktype = type;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0)
    return fmt::format("the name is not known ({})",
                       error == EAI_SYSTEM ? std::strerror(errno) : ::gai_strerror(error));
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> all(found, &::freeaddrinfo);
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next)
    if (use(*one)) break;
  return "";
}

std::string numbers_of(const sockaddr* address, socklen_t length) {
  char text[NI_MAXHOST];
  const int error = ::getnameinfo(address, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  return error == 0 ? text : "";
}

/// 0, or the errno of a connection that is not there after `limit`.
int connect_within(int socket, const addrinfo& address, std::chrono::milliseconds limit) {
  ::fcntl(socket, F_SETFL, O_NONBLOCK);
  if (::connect(socket, address.ai_addr, address.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) return errno;
    pollfd entry{socket, POLLOUT, 0};
    if (::poll(&entry, 1, static_cast<int>(limit.count())) <= 0) return ETIMEDOUT;
    int error = 0;
    socklen_t length = sizeof error;
    ::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) return error;
  }
  ::fcntl(socket, F_SETFL, 0);
  return 0;
}

}  // namespace

int left_ms(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
  return static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, INT_MAX));
}

Descriptor listen_tcp(int port, Listening where) {
  // An IPv6 socket takes IPv4 connections, too; hosts may be without IPv6.
  for (const int family : {AF_INET6, AF_INET}) {
    if (where == Listening::loopback && family == AF_INET6) continue;
    Descriptor socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (socket.get() < 0 && family == AF_INET6) continue;
    const int on = 1, off = 0;
    ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    sockaddr_storage address{};
    address.ss_family = static_cast<sa_family_t>(family);
    socklen_t length = sizeof(sockaddr_in);
    if (family == AF_INET6) {
      ::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
      reinterpret_cast<sockaddr_in6&>(address).sin6_port = htons(static_cast<std::uint16_t>(port));
      length = sizeof(sockaddr_in6);
    } else {
      auto& ipv4 = reinterpret_cast<sockaddr_in&>(address);
      ipv4.sin_port = htons(static_cast<std::uint16_t>(port));
      ipv4.sin_addr.s_addr = htonl(where == Listening::loopback ? INADDR_LOOPBACK : INADDR_ANY);
    }
    const bool listens = socket.get() >= 0 &&
                         ::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                         ::listen(socket.get(), SOMAXCONN) == 0;
    if (listens) return socket;
    if (family == AF_INET6 && errno == EADDRNOTAVAIL) continue;
    TORCH_CHECK_WITH(DistBackendError, false, "can't listen on port ", port, ": ",
                     std::strerror(errno));
  }
  TORCH_INTERNAL_ASSERT(false, "no family of addresses");
}

int port_of(const Descriptor& socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  TORCH_CHECK(::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &length) == 0,
              "getsockname: ", std::strerror(errno));
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

std::string peer_address(const Descriptor& socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (::getpeername(socket.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) return "";
  auto text = numbers_of(reinterpret_cast<sockaddr*>(&address), length);
  constexpr std::string_view kMapped = "::ffff:";  // an IPv4 address at an IPv6 socket
  if (text.starts_with(kMapped)) text.erase(0, kMapped.size());
  return text;
}

Descriptor connect_tcp(const std::string& host, int port, Deadline deadline) {
  while (true) {
    Descriptor connected;
    int error = 0;
    std::string why = for_each_address(host, port, SOCK_STREAM, [&](const addrinfo& address) {
      Descriptor socket(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
      const auto limit = std::min<std::chrono::milliseconds>(
          std::chrono::milliseconds(left_ms(deadline)), kAttempt);
      error = socket.get() < 0 ? errno : connect_within(socket.get(), address, limit);
      if (error == 0) connected = std::move(socket);
      return error == 0;
    });
    if (connected.get() >= 0) return connected;
    if (why.empty()) {
      why = std::strerror(error);
      if (error == ECONNREFUSED) why += ", nothing listens there";
    }
    if (Clock::now() + kRetry >= deadline) C10_THROW_ERROR(DistBackendError, why);
    std::this_thread::sleep_for(kRetry);
  }
}

std::string address_towards(const std::string& host) {
  std::string mine;
  (void)for_each_address(host, 1, SOCK_DGRAM, [&](const addrinfo& address) {
    const Descriptor socket(::socket(address.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_storage own{};
    socklen_t length = sizeof own;
    // Connecting a datagram socket sends nothing, but chooses the route.
    if (::connect(socket.get(), address.ai_addr, address.ai_addrlen) == 0 &&
        ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &length) == 0)
      mine = numbers_of(reinterpret_cast<sockaddr*>(&own), length);
    return !mine.empty();
  });
  return mine;
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1";
}

std::string own_address(const std::string& interface) {
  ifaddrs* found = nullptr;
  std::string address;
  if (::getifaddrs(&found) == 0) {
    const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> all(found, &::freeifaddrs);
    for (const ifaddrs* one = found; one != nullptr && address.empty(); one = one->ifa_next) {
      if (one->ifa_addr == nullptr || interface != one->ifa_name) continue;
      if (one->ifa_addr->sa_family == AF_INET)
        address = numbers_of(one->ifa_addr, sizeof(sockaddr_in));
      if (one->ifa_addr->sa_family == AF_INET6)
        address = numbers_of(one->ifa_addr, sizeof(sockaddr_in6));
    }
  }
  if (!address.empty()) return address;
  (void)for_each_address(interface, 0, SOCK_STREAM, [&](const addrinfo& candidate) {
    const Descriptor socket(::socket(candidate.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (::bind(socket.get(), candidate.ai_addr, candidate.ai_addrlen) == 0)
      address = numbers_of(candidate.ai_addr, candidate.ai_addrlen);
    return !address.empty();
  });
  return address;
}

}  // namespace braid
