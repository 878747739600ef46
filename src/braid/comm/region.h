// A rank's region of shared memory: a memfd, mapped; and its exchange with the other ranks of the host.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "braid/comm/hosts.h"

namespace braid {

using Nonce = std::array<std::uint64_t, 2>;

/// A mapped memfd. Starts with its owner's nonce.
class Region {
 public:
  /// Makes a new region of `bytes` (address space; pages appear on use). Errors: c10::Error with errno's text.
  static std::shared_ptr<Region> make(std::size_t bytes);
  /// Maps a peer's region, or finds it when it was made by this process. Null when the nonce is not
  /// there. Closes fd.
  static std::shared_ptr<Region> map(int fd, std::size_t bytes, const Nonce& nonce);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  std::byte* data() const { return data_; }
  const Nonce& nonce() const { return nonce_; }
  int fd() const { return fd_; }
  /// Gives [begin, end) pages. Errors: c10::Error when the host has no memory.
  void allocate(std::size_t begin, std::size_t end) const;

 private:
  Region() = default;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  Nonce nonce_{};
  int fd_ = -1;
};

struct Exchange {
  Hosts hosts;
  // Of this host's ranks, in their order:
  std::vector<std::shared_ptr<Region>> regions;
  std::vector<int> sockets;  // open; -1 for this one. The caller closes them.
};

/// Finds the ranks of this host, passes them `mine` and maps theirs. Collective over the store. Ranks are on one
/// host when they reach each other's abstract socket, as one user, and their regions' nonces are seen.
///   pretended_host   ranks with different ones are never on one host
///   most             ranks of a host that share regions; more are as on several hosts
/// Errors: DistBackendError when a peer does not come within the time-out.
Exchange exchange_regions(const c10::intrusive_ptr<c10d::Store>& store, const std::string& group,
                          int rank, int size, int pretended_host, int most,
                          const std::shared_ptr<Region>& mine, std::size_t bytes,
                          std::chrono::milliseconds timeout);

}  // namespace braid
