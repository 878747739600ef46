// Sorts ranks by their hosts.
#include "braid/comm/hosts.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <utility>

namespace braid {

Hosts::Hosts(const std::vector<int>& first_on_host, int most) {
  std::map<int, std::pair<int, int>> open;  // by first rank: the host that is filled now, its ranks
  for (std::size_t rank = 0; rank < first_on_host.size(); ++rank) {
    auto [entry, is_new] = open.try_emplace(first_on_host[rank], count(), 0);
    auto& [host, num_ranks] = entry->second;
    if (!is_new && num_ranks == most) {
      host = count();
      num_ranks = 0;
    }
    if (num_ranks == 0) ranks_.emplace_back();
    ranks_[static_cast<std::size_t>(host)].push_back(static_cast<int>(rank));
    host_of_.push_back(host);
    index_.push_back(num_ranks++);
  }
}

Hosts Hosts::all_on_one(int num_ranks) {
  return {std::vector<int>(static_cast<std::size_t>(num_ranks), 0), num_ranks};
}

std::string Hosts::text_of(int rank) const {
  if (count() < 2 || neighbours(rank).size() == 1) return std::to_string(rank);
  return fmt::format("{} (of the host with ranks {})", rank, fmt::join(neighbours(rank), ", "));
}

std::vector<int> Hosts::others(int rank) const {
  std::vector<int> result;
  for (int step = 1; step < count(); ++step) result.push_back((of(rank) + step) % count());
  return result;
}

std::vector<int> Hosts::guests(int rank) const {
  std::vector<int> result;
  for (const int host : others(rank))
    for (const int guest : ranks(host))
      if (proxy(guest, of(rank)) == rank) result.push_back(guest);
  return result;
}

int Hosts::guest_number(int guest, int host) const {
  const auto all = guests(proxy(guest, host));
  return static_cast<int>(std::find(all.begin(), all.end(), guest) - all.begin());
}

}  // namespace braid
