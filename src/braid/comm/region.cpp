// Makes regions and passes their file descriptors over abstract unix sockets.
#include "braid/comm/region.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>

#include "braid/core/check.h"
#include "braid/core/descriptor.h"

namespace braid {
namespace {

// Regions that this process made, so that ranks which are its threads share one mapping.
std::mutex made_mutex;
std::map<Nonce, std::weak_ptr<Region>>& made() {
  static auto& regions = *new std::map<Nonce, std::weak_ptr<Region>>;
  return regions;
}

std::byte* map_fd(int fd, std::size_t bytes) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  TORCH_CHECK(data != MAP_FAILED, "can't map ", bytes,
              " bytes of shared memory: ", std::strerror(errno),
              ". HINT: a smaller BRAID_SLOT_BYTES reserves less address space");
  ::madvise(data, bytes, MADV_DONTDUMP);  // a core file would walk through all of it
  return static_cast<std::byte*>(data);
}

// What travels with a region's descriptor. `to` is the receiver's nonce, known only from the group's store.
struct Greeting {
  Nonce from, to;
  std::int32_t rank;
};

void send_region(int socket, const Greeting& greeting, int fd) {
  iovec data{const_cast<Greeting*>(&greeting), sizeof greeting};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof fd)] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof fd);
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  TORCH_CHECK(::sendmsg(socket, &message, MSG_NOSIGNAL) == sizeof greeting,
              "can't pass shared memory to a peer: ", std::strerror(errno));
}

bool readable(int socket, std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  for (const auto deadline = Clock::now() + timeout;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    pollfd entry{socket, POLLIN, 0};
    const int result =
        ::poll(&entry, 1, static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, INT_MAX)));
    if (result >= 0 || errno != EINTR) return result > 0;
  }
}

/// Returns the descriptor, -1 when the message is not a greeting.
int receive_region(int socket, Greeting& greeting, std::chrono::milliseconds timeout) {
  if (!readable(socket, timeout)) return -1;
  iovec data{&greeting, sizeof greeting};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  if (::recvmsg(socket, &message, MSG_CMSG_CLOEXEC) != sizeof greeting) return -1;
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header == nullptr || header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
    return -1;
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
  return fd;
}

bool same_user(int socket) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 &&
         peer.uid == ::geteuid();
}

std::string socket_name(const Nonce& nonce) {
  return fmt::format("braid-{:016x}{:016x}", nonce[0], nonce[1]);
}

sockaddr_un address_of(const std::string& name, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // a leading 0: abstract
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

Descriptor make_socket() {
  Descriptor fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  TORCH_CHECK(fd.get() >= 0, "can't make a unix socket: ", std::strerror(errno));
  return fd;
}

Descriptor listen_on(const Nonce& nonce, int backlog) {
  Descriptor fd = make_socket();
  socklen_t length = 0;
  const sockaddr_un address = address_of(socket_name(nonce), length);
  TORCH_CHECK(::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0 &&
                  ::listen(fd.get(), backlog) == 0,
              "can't listen on a unix socket: ", std::strerror(errno));
  return fd;
}

Descriptor connect_to(const Nonce& nonce) {
  Descriptor fd = make_socket();
  socklen_t length = 0;
  const sockaddr_un address = address_of(socket_name(nonce), length);
  int result = 0;
  do {
    result = ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length);
  } while (result != 0 && errno == EINTR);
  return result == 0 ? std::move(fd) : Descriptor();
}

// From here on, it is worth to ask whether the host has so much.
constexpr std::size_t kLarge = 64 << 20;

/// Bytes that the host can give, as the kernel estimates it; unknown is any number.
std::size_t available_memory() {
  std::ifstream file("/proc/meminfo");
  for (std::string name, unit; file >> name;) {
    std::size_t kilobytes = 0;
    file >> kilobytes;
    std::getline(file, unit);
    if (name == "MemAvailable:") return kilobytes << 10;
  }
  return SIZE_MAX;
}

/// A group's rank and store, for the exchange.
struct Member {
  c10d::Store& store;
  const std::string& group;
  int rank, size;

  /// Values of all ranks under `key`, mine included.
  template <class T>
  std::vector<T> share(const std::string& key, const T& mine) const {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(&mine);
    std::vector<T> all(static_cast<std::size_t>(size), mine);
    int peer = rank;
    try {
      store.set(key_of(key, rank), std::vector<std::uint8_t>(bytes, bytes + sizeof mine));
      for (peer = 0; peer < size; ++peer) {
        if (peer == rank) continue;
        const auto text = store.get(key_of(key, peer));
        TORCH_CHECK(text.size() == sizeof(T), key_of(key, peer), " is not what braid wrote");
        std::memcpy(&all[static_cast<std::size_t>(peer)], text.data(), sizeof(T));
      }
    } catch (const std::exception& error) {
      C10_THROW_ERROR(DistBackendError,
                      fmt::format("group {} rank {}: rank {} did not come to make the group: {}",
                                  group, rank, peer, text_of(error)));
    }
    return all;
  }

 private:
  static std::string key_of(const std::string& key, int rank) {
    return fmt::format("shared_memory/{}/{}", key, rank);
  }
};

}  // namespace

std::shared_ptr<Region> Region::make(std::size_t bytes) {
  rlimit files{};
  TORCH_CHECK(::getrlimit(RLIMIT_FSIZE, &files) != 0 || files.rlim_cur >= bytes, "can't make ",
              bytes, " bytes of shared memory: files of this process are limited to ",
              files.rlim_cur, " bytes (ulimit -f). HINT: a smaller BRAID_SLOT_BYTES reserves less");
  auto region = std::shared_ptr<Region>(new Region);
  region->fd_ = ::memfd_create("braid", MFD_CLOEXEC);
  TORCH_CHECK(region->fd_ >= 0 && ::ftruncate(region->fd_, static_cast<off_t>(bytes)) == 0,
              "can't make ", bytes, " bytes of shared memory: ", std::strerror(errno));
  region->data_ = map_fd(region->fd_, bytes);
  region->bytes_ = bytes;
  region->allocate(0, sizeof(Nonce));
  TORCH_CHECK(::getrandom(region->nonce_.data(), sizeof(Nonce), 0) == sizeof(Nonce),
              "no random numbers");
  std::memcpy(region->data_, region->nonce_.data(), sizeof(Nonce));
  const std::lock_guard lock(made_mutex);
  made()[region->nonce_] = region;
  return region;
}

std::shared_ptr<Region> Region::map(int fd, std::size_t bytes, const Nonce& nonce) {
  const Descriptor closer(fd);
  {
    const std::lock_guard lock(made_mutex);
    if (const auto found = made().find(nonce); found != made().end()) return found->second.lock();
  }
  auto region = std::shared_ptr<Region>(new Region);
  region->data_ = map_fd(fd, bytes);
  region->bytes_ = bytes;
  region->nonce_ = nonce;
  if (std::memcmp(region->data_, nonce.data(), sizeof nonce) != 0) return nullptr;
  return region;
}

Region::~Region() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
  if (fd_ < 0) return;
  ::close(fd_);
  const std::lock_guard lock(made_mutex);
  made().erase(nonce_);
}

void Region::allocate(std::size_t begin, std::size_t end) const {
  // fallocate itself fails only where memory is not overcommitted; elsewhere it would wake the kernel's killer.
  TORCH_CHECK(end - begin < kLarge || end - begin <= available_memory(), "this host has no ",
              end - begin, " bytes more of shared memory: ", available_memory(), " are available");
  int result = 0;
  do {
    result = ::fallocate(fd_, 0, static_cast<off_t>(begin), static_cast<off_t>(end - begin));
  } while (result != 0 && errno == EINTR);
  TORCH_CHECK(result == 0, "this host has no ", end - begin,
              " bytes more of shared memory: ", std::strerror(errno));
}

Exchange exchange_regions(const c10::intrusive_ptr<c10d::Store>& store, const std::string& group,
                          int rank, int size, int pretended_host, int most,
                          const std::shared_ptr<Region>& mine, std::size_t bytes,
                          std::chrono::milliseconds timeout) {
  struct Offer {
    Nonce nonce;
    std::uint64_t bytes;
    std::int64_t pretended_host;
  };
  struct First {
    int on_host;
  };
  struct Mapped {
    bool yes;
  };
  const Member member{*store, group, rank, size};
  Descriptor listener = listen_on(mine->nonce(), size);
  const std::vector<Offer> all = member.share("offer", Offer{mine->nonce(), bytes, pretended_host});

  std::vector<Descriptor> reached(static_cast<std::size_t>(size));
  int first_here = rank;
  for (int peer = rank - 1; peer >= 0; --peer) {
    const auto p = static_cast<std::size_t>(peer);
    if (all[p].pretended_host != pretended_host) continue;
    Descriptor socket = connect_to(all[p].nonce);
    if (socket.get() < 0 || !same_user(socket.get())) continue;
    first_here = peer;
    reached[p] = std::move(socket);
  }
  // A connection waits in the listener's backlog, so nobody has to accept before all know who is where.
  std::vector<int> first_on_host;
  for (const First& first : member.share("first", First{first_here}))
    first_on_host.push_back(first.on_host);
  Exchange result{Hosts(first_on_host, most), {}, {}};
  const std::vector<int>& here = result.hosts.neighbours(rank);
  for (int peer = 0; peer < rank; ++peer) {
    const auto p = static_cast<std::size_t>(peer);
    TORCH_CHECK_WITH(DistBackendError, (reached[p].get() >= 0) == (first_on_host[p] == first_here),
                     "group ", group, ": ranks ", rank, " and ", peer,
                     " disagree in who shares a host");
  }
  for (const int peer : here) {
    const auto p = static_cast<std::size_t>(peer);
    BRAID_CHECK(all[p].bytes == bytes, "group ", group, ": ranks ", std::min(peer, rank), " and ",
                std::max(peer, rank), " differ in their bytes of shared memory: ",
                all[static_cast<std::size_t>(std::min(peer, rank))].bytes, " and ",
                all[static_cast<std::size_t>(std::max(peer, rank))].bytes,
                ". HINT: the same BRAID_SLOT_BYTES on all ranks of a host");
  }

  const auto own = static_cast<std::size_t>(result.hosts.index(rank));
  std::vector<Descriptor> sockets(here.size());
  result.regions.resize(here.size());
  result.regions[own] = mine;
  for (std::size_t i = 0; i < own; ++i) {
    const auto p = static_cast<std::size_t>(here[i]);
    sockets[i] = std::move(reached[p]);
    send_region(sockets[i].get(), {mine->nonce(), all[p].nonce, rank}, mine->fd());
  }
  const auto receive = [&](int socket, Greeting& greeting) {
    const int fd = receive_region(socket, greeting, timeout);
    if (fd < 0) return std::shared_ptr<Region>();
    const bool known = greeting.rank >= 0 && greeting.rank < size &&
                       greeting.from == all[static_cast<std::size_t>(greeting.rank)].nonce &&
                       greeting.to == mine->nonce() && result.hosts.together(greeting.rank, rank);
    if (!known) {
      ::close(fd);
      return std::shared_ptr<Region>();
    }
    return Region::map(fd, bytes, greeting.from);
  };
  for (std::size_t missing = here.size() - 1 - own; missing > 0;) {
    TORCH_CHECK_WITH(DistBackendError, readable(listener.get(), timeout), "group ", group, " rank ",
                     rank, ": ", missing, " peers passed no shared memory within ", timeout.count(),
                     " ms");
    Descriptor socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    Greeting greeting{};
    if (socket.get() < 0 || !same_user(socket.get())) continue;  // a stranger
    auto region = receive(socket.get(), greeting);
    if (region == nullptr) continue;
    const auto i = static_cast<std::size_t>(result.hosts.index(greeting.rank));
    send_region(socket.get(), {mine->nonce(), greeting.from, rank}, mine->fd());
    result.regions[i] = std::move(region);
    sockets[i] = std::move(socket);
    --missing;
  }
  for (std::size_t i = 0; i < own; ++i) {
    Greeting greeting{};
    result.regions[i] = receive(sockets[i].get(), greeting);
    TORCH_CHECK_WITH(DistBackendError, result.regions[i] != nullptr, "group ", group, " rank ",
                     rank, ": peer ", here[i], " passed no shared memory within ", timeout.count(),
                     " ms");
  }
  // Nobody leaves before all have mapped all: a rank that is done with its group at once takes its
  // region with it.
  (void)member.share("mapped", Mapped{true});
  for (Descriptor& socket : sockets) result.sockets.push_back(socket.release());
  return result;
}

}  // namespace braid
