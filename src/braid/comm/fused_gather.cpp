// The fused gather stream: rows from the memory of this host's ranks, tiles from other hosts.
#include <c10/util/hash.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "braid/comm/collectives.h"
#include "braid/comm/shared_memory.h"
#include "braid/comm/slot_tensor.h"
#include "braid/comm/streams.h"
#include "braid/comm/wire.h"

namespace braid {

int useful_chunks(int num_chunks, const std::vector<std::int64_t>& rows) {
  const std::int64_t most = *std::max_element(rows.begin(), rows.end());
  return static_cast<int>(
      std::clamp<std::int64_t>(num_chunks, 1, std::clamp<std::int64_t>(most, 1, kMaxChunks)));
}

RowRange tile_range(std::int64_t rows, int num_tiles, int tile) {
  // In halves of an inner tile: the first and the last tile are one, the others two.
  const std::int64_t total = std::max(2 * num_tiles - 2, 1);
  const auto begin_of = [&](int i) {
    return rows * (i == num_tiles ? total : std::max(2 * i - 1, 0)) / total;
  };
  return {begin_of(tile), begin_of(tile + 1) - begin_of(tile)};
}

namespace {

/// NOTE [slots of a gather]. A rank's slot holds its own rows, where it has neighbours to read them, and then
/// those of its guests (comm/hosts.h), whom it receives for all its host. Flag `result` counts what has
/// arrived: piece by piece, in each piece a tile of every guest.
class FusedGather final : public GatherStream {
 public:
  FusedGather(const Group& group, const char* name, const at::Tensor& x_shard,
              std::vector<std::int64_t> rows, int num_tiles)
      : group_(group),
        name_(name),
        x_(x_shard),
        rows_(std::move(rows)),
        num_tiles_(group.on_one_host() ? 0 : useful_chunks(num_tiles, rows_)),
        lease_(group.memory()->start(header(), slot_bytes())) {
    if (!lease_.is_stub() && is_read())
      store_to_slot(slot_tensor(lease_, group.rank(), 0, x_.sizes(), x_.scalar_type()), x_);
    lease_.publish(1);
    if (group.on_one_host()) return;
    exchange();
  }

  const std::vector<std::int64_t>& rows() override {
    if (rows_.empty()) {
      lease_.agree();
      for (int peer = 0; peer < group_.size(); ++peer) rows_.push_back(lease_.header(peer).rows);
    }
    return rows_;
  }

  std::optional<GatheredTile> next() override {
    reads_.reset();
    const auto& here = group_.hosts().neighbours(group_.rank());
    if (num_given_ < here.size()) return shard_of(here[(own_index() + num_given_++) % here.size()]);
    lease_.agree();
    while (piece_ < num_tiles_) {
      if (guest_ == away_.size()) {
        guest_ = 0;
        ++piece_;
        continue;
      }
      const int rank = away_[guest_++];
      if (const RowRange rows = range(rank, piece_); rows.length > 0) return tile_of(rank, rows);
    }
    if (operation_) operation_->finish();
    operation_.reset();
    lease_.release();
    return std::nullopt;
  }

 private:
  std::size_t own_index() const {
    return static_cast<std::size_t>(group_.hosts().index(group_.rank()));
  }
  bool is_read() const { return group_.hosts().neighbours(group_.rank()).size() > 1; }
  std::int64_t rows_of(int rank) const { return rows_[static_cast<std::size_t>(rank)]; }
  std::size_t bytes_of(std::int64_t rows) const {
    return static_cast<std::size_t>(rows * x_.size(1)) * x_.element_size();
  }
  /// Where a guest's rows begin in its proxy's slot.
  std::size_t offset(int proxy, int guest) const {
    std::int64_t before = is_read() ? rows_of(proxy) : 0;
    for (const int other : group_.hosts().guests(proxy)) {
      if (other == guest) break;
      before += rows_of(other);
    }
    return bytes_of(before);
  }
  int proxy_of(int rank) const {
    return group_.hosts().proxy(rank, group_.hosts().of(group_.rank()));
  }

  Header header() const {
    Header header;
    std::strncpy(header.op, name_, sizeof header.op - 1);
    header.dtype = static_cast<std::int64_t>(x_.scalar_type());
    header.k = x_.size(1);
    header.rows = x_.size(0);
    header.set_rows_of_ranks(rows_);
    if (num_tiles_ > 0)
      header.set_variant("rows and tiles (hash)",
                         static_cast<std::int64_t>(c10::get_hash(rows_, num_tiles_)));
    return header;
  }
  std::size_t slot_bytes() const {
    std::size_t bytes = is_read() ? x_.nbytes() : 0;
    for (const int guest : group_.hosts().guests(group_.rank())) bytes += bytes_of(rows_of(guest));
    return bytes;
  }

  /// A tile's rows among those of its rank.
  RowRange range(int rank, int piece) const { return tile_range(rows_of(rank), num_tiles_, piece); }
  at::Tensor place_of(int rank, const RowRange& rows) const {
    const int proxy = proxy_of(rank);
    return slot_tensor(lease_, proxy, offset(proxy, rank) + bytes_of(rows.begin),
                       {rows.length, x_.size(1)}, x_.scalar_type());
  }

  void exchange() {
    const Hosts& hosts = group_.hosts();
    operation_.emplace(*group_.wire(), name_, header());
    const auto guests = hosts.guests(group_.rank());
    std::vector<std::pair<Message, at::Tensor>> arrivals;
    for (int p = 0; p < num_tiles_; ++p) {
      for (const int guest : guests) {
        const at::Tensor place = place_of(guest, range(guest, p));
        arrivals.emplace_back(operation_->receive(Hop::first, place, guest), place);
      }
    }
    const at::Tensor x = x_.contiguous();
    for (int p = 0; p < num_tiles_; ++p) {
      const RowRange rows = range(group_.rank(), p);
      for (const int host : hosts.others(group_.rank()))
        operation_->send(Hop::first, x.narrow(0, rows.begin, rows.length),
                         hosts.proxy(group_.rank(), host));
    }
    int count = 0;
    for (auto& [message, place] : arrivals) {
      operation_->submit(
          [this, message = std::move(message), place = place, count = ++count]() mutable {
            message.wait();
            tsan::write(place.data_ptr(), place.nbytes());
            lease_.publish_result(count);
          });
    }
    for (const int host : hosts.others(group_.rank())) {
      const auto& there = hosts.ranks(host);
      away_.insert(away_.end(), there.begin(), there.end());
    }
  }

  GatheredTile shard_of(int peer) {
    const std::int64_t begin = first_row(rows(), peer);
    if (peer == group_.rank()) return {begin, x_};
    lease_.agree();
    lease_.wait_published(peer, 1);
    const at::Tensor shard =
        slot_tensor(lease_, peer, 0, {rows_of(peer), x_.size(1)}, x_.scalar_type());
    reads_.emplace(shard);
    return {begin, shard};
  }

  GatheredTile tile_of(int rank, const RowRange& rows) {
    const Hosts& hosts = group_.hosts();
    const int proxy = proxy_of(rank);
    lease_.wait_result(proxy, piece_ * static_cast<int>(hosts.guests(proxy).size()) +
                                  hosts.guest_number(rank, hosts.of(proxy)) + 1);
    const at::Tensor data = place_of(rank, rows);
    reads_.emplace(data);
    return {first_row(rows_, rank) + rows.begin, data};
  }

  const Group& group_;
  const char* name_;
  at::Tensor x_;
  std::vector<std::int64_t> rows_;
  const int num_tiles_;  // of a rank's rows on the wire
  SharedMemory::Lease lease_;
  std::size_t num_given_ = 0;  // shards of this host
  std::vector<int> away_;      // ranks of other hosts, in the order of their tiles
  int piece_ = 0;
  std::size_t guest_ = 0;                     // the next one, in away_
  std::optional<SlotReads> reads_;            // of the tile that was given last
  std::optional<Wire::Operation> operation_;  // between hosts
};

}  // namespace

std::unique_ptr<GatherStream> make_fused_gather(const Group& group, const char* name,
                                                const at::Tensor& x_shard,
                                                std::vector<std::int64_t> rows, int num_tiles) {
  return std::make_unique<FusedGather>(group, name, x_shard, std::move(rows), num_tiles);
}

}  // namespace braid
