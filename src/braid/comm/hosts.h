// Which ranks of a group share a host, and who stands for whom on another one.
//
// NOTE [proxies]. What a rank sends to another host, or is sent from there, passes through one rank there, its
// proxy: so a byte crosses the wire once a host. The ranks of a host are proxies in turn of those of
// another host, by their places on the hosts; a rank is its own proxy at home.
#pragma once

#include <string>
#include <vector>

namespace braid {

class Hosts {
 public:
  Hosts() = default;
  /// `first_on_host`: of each rank, the lowest rank of its host. At most `most` ranks of a host
  /// stay together.
  Hosts(const std::vector<int>& first_on_host, int most);
  /// One host, of ranks 0 to num_ranks - 1.
  static Hosts all_on_one(int num_ranks);

  int count() const { return static_cast<int>(ranks_.size()); }
  /// Ascending; hosts are numbered by their lowest rank.
  const std::vector<int>& ranks(int host) const { return ranks_[static_cast<std::size_t>(host)]; }
  int of(int rank) const { return host_of_[static_cast<std::size_t>(rank)]; }
  const std::vector<int>& neighbours(int rank) const { return ranks(of(rank)); }
  /// The place of a rank among those of its host.
  int index(int rank) const { return index_[static_cast<std::size_t>(rank)]; }
  bool together(int a, int b) const { return of(a) == of(b); }

  int proxy(int rank, int host) const {
    if (of(rank) == host) return rank;
    const auto& there = ranks(host);
    return there[static_cast<std::size_t>(index(rank)) % there.size()];
  }
  /// The other hosts than this rank's, the next one first.
  std::vector<int> others(int rank) const;
  /// The ranks of those hosts, in that order, whose proxy `rank` is.
  std::vector<int> guests(int rank) const;
  /// The place of `guest` among the guests of its proxy on `host`.
  int guest_number(int guest, int host) const;
  /// For errors: the rank and, where there are several hosts, who else may be behind a wire that was cut.
  std::string text_of(int rank) const;

 private:
  std::vector<std::vector<int>> ranks_;
  std::vector<int> host_of_, index_;
};

}  // namespace braid
