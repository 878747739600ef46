// The fused reduce stream: partial products into the memory of this host's ranks, sums to other hosts.
#include <c10/util/hash.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "braid/comm/collectives.h"
#include "braid/comm/shared_memory.h"
#include "braid/comm/slot_tensor.h"
#include "braid/comm/streams.h"
#include "braid/comm/sums.h"
#include "braid/comm/wire.h"

namespace braid {
namespace {

/// NOTE [direct]. Every writer has its own place in the owner's slot, so no rank waits for a chain.
/// The owner sums the partials in rank order and its own product onto them: an order that depends on
/// (owner, ranks) alone. Cost: each rank writes (R-1)/R and reads (R-1)/R of m * n elements; with two
/// ranks the product is added by the matmul.
///
/// NOTE [ring]. One partial for each owner lies in the owner's slot, and the ranks add their products
/// to it in place, one after the other: owner + 1, owner + 2, ..., the owner. No sums beside the
/// matmuls and one place instead of R-1, but each tile waits for the rank before.
///
/// NOTE [hosts]. For an owner on another host its proxy here (comm/hosts.h) stands in: this host's partials are
/// summed in the proxy's slot as they are in an owner's, and the sum crosses the wire. The owner adds what
/// comes from the other hosts, in their order, to its own host's sum; an all-reduce sends the result to
/// its proxies, where the ranks of their hosts read it. Rows are cut in pieces, so that one travels while
/// the next is made: first those of the other hosts, then those of this one. A step of the progress
/// thread (comm/wire.h) adds and sends on, so the matmuls wait for no other host.
///
/// NOTE [partials] are in the dtype of sums. Native half products are rounded when they are made, so
/// they travel as they are; then the owner's own product has a place of its own, too, and all are
/// summed in f32 and rounded once more. Sums of a host are rounded to the result's dtype for the wire.
///
/// NOTE [kept result]. Where partials are in the result's dtype, the first one (or the own product)
/// lies where the owner's rows of the result lie, and a large result stays in the slot and keeps it:
/// nothing is copied but an all-reduce's rows of the peers. As the caller may write into its result,
/// an all-reduce returns it only after all peers have read this rank's rows.
class FusedReduce final : public ReduceStream {
 public:
  FusedReduce(const Group& group, const char* name, ReduceShape shape, bool ring, bool native,
              int num_tiles)
      : group_(group),
        hosts_(group.hosts()),
        name_(name),
        rank_(group.rank()),
        here_(hosts_.neighbours(rank_)),
        shape_(std::move(shape)),
        ring_(ring),
        dtype_(native ? shape_.dtype : sum_dtype(shape_.dtype)),
        own_apart_(dtype_ != sum_dtype(dtype_)),
        num_tiles_(group.on_one_host() ? 1 : useful_chunks(num_tiles, shape_.rows)),
        num_others_(ring ? 0 : std::max(0, static_cast<int>(here_.size()) - (own_apart_ ? 1 : 2))),
        result_rows_(shape_.all_reduce ? std::reduce(shape_.rows.begin(), shape_.rows.end())
                                       : rows_of(rank_)),
        lease_(group.memory()->start(header(), wire_offset(rank_, rank_) + outgoing_bytes(rank_))) {
    if (group.on_one_host()) {
      for (int i = 0; i < group.size(); ++i)
        order_.push_back({(rank_ + (ring_ ? 2 * group.size() - 1 - i : 1 + i)) % group.size(), 0});
    } else {
      order_tiles();
      operation_.emplace(*group.wire(), name_, header());
      post_receives();
    }
  }

  std::optional<PartialTile> next() override {
    lease_.agree();
    post();
    if (num_given_ == order_.size()) return std::nullopt;
    const bool is_first = num_given_ == 0;
    tile_ = order_[num_given_++];
    const int station = station_of(tile_.owner);
    const bool is_here = station == rank_;
    const bool adds = is_here ? !own_apart_ && here_.size() > 1 : ring_ && !is_first;
    const RowRange rows = range(tile_);
    if (adds && !is_here) lease_.wait_posted(previous(), tile_.owner, 1);
    given_ = is_here ? first_place(rank_, tile_) : place(station, tile_, rank_);
    if (adds && is_here) wait_and_sum();
    tsan::write(given_.data_ptr(), given_.nbytes());
    PartialTile tile{first_row(shape_.rows, tile_.owner) + rows.begin, rows.length, given_,
                     adds && !lease_.is_stub()};
    if (tile_.owner == rank_ && here_.size() == 1 && !own_apart_) tile.bias = shape_.bias;
    return tile;
  }

  /// For the peers' partials; or, before the first tile, for peers that have not come to this operation
  /// yet. Other hosts' sums depend on this rank's tiles, so between hosts they are all made at once.
  bool next_waits() const override {
    if (!group_.on_one_host()) return false;
    if (num_given_ == 0) return !lease_.all_have_started();
    return ring_ || num_given_ + (own_apart_ ? 0 : 1) >= order_.size();
  }

  at::Tensor finish() override {
    post();
    if (!group_.on_one_host()) lease_.wait_result(rank_, num_tiles_);
    const bool kept = take_result();
    for (int piece = 0; shape_.all_reduce && piece < num_tiles_; ++piece) {
      for (int step = 0; step < group_.size(); ++step) {
        const Tile tile{(rank_ + step) % group_.size(), piece};
        const int station = station_of(tile.owner);
        if (kept && (tile.owner == rank_ || lease_.is_stub())) continue;
        lease_.wait_result(station, result_count(tile));
        if (kept && station == rank_) continue;
        const RowRange rows = range(tile);
        load_from_slot(
            result_.narrow(0, first_row(shape_.rows, tile.owner) + rows.begin, rows.length),
            reduced_place(station, tile));
      }
    }
    if (operation_) operation_->finish();
    operation_.reset();
    if (kept && shape_.all_reduce)
      lease_.release_and_wait();
    else
      lease_.release();
    if (kept) tsan::write(result_.data_ptr(), result_.nbytes());  // its owner may, from here on
    return result_;
  }

 private:
  // A smaller result is copied out: slots are few.
  static constexpr std::size_t kKeepBytes = 256 << 10;

  struct Tile {
    int owner, piece;
  };

  std::int64_t rows_of(int rank) const { return shape_.rows[static_cast<std::size_t>(rank)]; }
  int previous() const { return (rank_ + group_.size() - 1) % group_.size(); }
  /// Who sums this host's partials for an owner.
  int station_of(int owner) const { return hosts_.proxy(owner, hosts_.of(rank_)); }
  bool partials_are_results() const { return dtype_ == shape_.dtype; }
  /// The first places lie where the rows of an all-reduce's result lie.
  bool in_result() const { return shape_.all_reduce && partials_are_results(); }
  std::size_t bytes_of(std::int64_t rows) const {
    return static_cast<std::size_t>(rows * shape_.n) * at::elementSize(dtype_);
  }
  std::size_t wire_bytes_of(std::int64_t rows) const {
    return static_cast<std::size_t>(rows * shape_.n) * at::elementSize(shape_.dtype);
  }

  /// A tile's rows among those of its owner.
  RowRange range(const Tile& tile) const {
    return tile_range(rows_of(tile.owner), num_tiles_, tile.piece);
  }

  Header header() const {
    Header header;
    std::strncpy(header.op, name_, sizeof header.op - 1);
    header.dtype = static_cast<std::int64_t>(shape_.dtype);
    header.n = shape_.n;
    header.rows = std::reduce(shape_.rows.begin(), shape_.rows.end());
    header.set_variant("split and plan (hash)", static_cast<std::int64_t>(c10::get_hash(
                                                    shape_.rows, ring_, own_apart_, num_tiles_)));
    return header;
  }

  void order_tiles() {
    std::vector<int> guests, others;
    for (const int host : hosts_.others(rank_))
      for (const int rank : hosts_.ranks(host))
        (station_of(rank) == rank_ ? guests : others).push_back(rank);
    for (int piece = 0; piece < num_tiles_; ++piece) {
      for (const int owner : others) order_.push_back({owner, piece});
      for (const int owner : guests) order_.push_back({owner, piece});
    }
    for (int piece = 0; piece < num_tiles_; ++piece)
      for (std::size_t step = 1; step <= here_.size(); ++step)
        order_.push_back(
            {here_[(static_cast<std::size_t>(hosts_.index(rank_)) + step) % here_.size()], piece});
  }

  int num_guests(int station) const { return static_cast<int>(hosts_.guests(station).size()); }
  int guest_number(int owner) const { return hosts_.guest_number(owner, hosts_.of(rank_)); }
  /// Counts a station's tiles in the order in which every rank of its host writes them.
  int post_count(const Tile& tile) const {
    const int station = station_of(tile.owner);
    if (tile.owner == station) return num_tiles_ * num_guests(station) + tile.piece + 1;
    return tile.piece * num_guests(station) + guest_number(tile.owner) + 1;
  }
  /// Counts a station's results: own rows, then those of its guests as they arrive.
  int result_count(const Tile& tile) const {
    const int station = station_of(tile.owner);
    if (tile.owner == station) return tile.piece + 1;
    return num_tiles_ + tile.piece * num_guests(station) + guest_number(tile.owner) + 1;
  }

  struct Area {
    std::size_t first, others;  // where a station's first place for an owner is, and its other ones
    std::size_t end;
  };
  /// The areas of a station's slot: for its own rows, and then for those of its guests.
  Area area(int station, int owner) const {
    std::size_t end = in_result() ? bytes_of(result_rows_) : 0;
    const auto add = [&](int rank) {
      const Area area{in_result() ? bytes_of(first_row(shape_.rows, rank)) : end,
                      in_result() ? end : end + bytes_of(rows_of(rank)), 0};
      end = area.others + bytes_of(num_others_ * rows_of(rank));
      return area;
    };
    Area found = add(station);
    for (const int guest : hosts_.guests(station))
      if (const Area next = add(guest); guest == owner) found = next;
    found.end = end;
    return found;
  }
  /// What the wire needs beside them: places for what comes from the other hosts, and, where partials are not
  /// in the result's dtype, for each guest and for the own rows what goes out.
  std::size_t outgoing_bytes(int owner) const {
    return group_.on_one_host() || partials_are_results() ? 0 : wire_bytes_of(rows_of(owner));
  }
  std::size_t arrivals_offset(int station) const { return area(station, station).end; }
  std::size_t wire_offset(int station, int owner) const {
    std::size_t offset =
        arrivals_offset(station) + wire_bytes_of((hosts_.count() - 1) * rows_of(station));
    for (const int guest : hosts_.guests(station)) {
      if (guest == owner) return offset;
      offset += outgoing_bytes(guest);
    }
    return offset;
  }

  at::Tensor first_place(int station, const Tile& tile) const {
    const RowRange rows = range(tile);
    return slot_tensor(lease_, station, area(station, tile.owner).first + bytes_of(rows.begin),
                       {rows.length, shape_.n}, dtype_);
  }
  /// Where `writer` puts its partial at a station: in rank order without the station.
  at::Tensor place(int station, const Tile& tile, int writer) const {
    const int number =
        ring_ ? 0 : hosts_.index(writer) - (writer > station ? 1 : 0) + (own_apart_ ? 1 : 0);
    if (number == 0) return first_place(station, tile);
    const RowRange rows = range(tile);
    const std::size_t offset = area(station, tile.owner).others +
                               bytes_of((number - 1) * rows_of(tile.owner) + rows.begin);
    return slot_tensor(lease_, station, offset, {rows.length, shape_.n}, dtype_);
  }
  /// What a station sends of a tile, or receives of a guest's.
  at::Tensor wire_place(int station, const Tile& tile) const {
    if (partials_are_results()) return first_place(station, tile);
    const RowRange rows = range(tile);
    return slot_tensor(lease_, station,
                       wire_offset(station, tile.owner) + wire_bytes_of(rows.begin),
                       {rows.length, shape_.n}, shape_.dtype);
  }
  at::Tensor reduced_place(int station, const Tile& tile) const {
    return station == tile.owner ? first_place(station, tile) : wire_place(station, tile);
  }
  /// Where another host's sum for a piece of the own rows arrives.
  at::Tensor arrival_place(int host, int piece) const {
    const RowRange rows = range({rank_, piece});
    const int number = host - (host > hosts_.of(rank_) ? 1 : 0);
    const std::size_t offset =
        arrivals_offset(rank_) + wire_bytes_of(number * rows_of(rank_) + rows.begin);
    return slot_tensor(lease_, rank_, offset, {rows.length, shape_.n}, shape_.dtype);
  }

  void post_receives() {
    arrivals_.resize(static_cast<std::size_t>(num_tiles_));
    for (int piece = 0; piece < num_tiles_; ++piece)
      for (int host = 0; host < hosts_.count(); ++host)
        if (host != hosts_.of(rank_))
          arrivals_[static_cast<std::size_t>(piece)].push_back(operation_->receive(
              Hop::first, arrival_place(host, piece), hosts_.proxy(rank_, host)));
    if (!shape_.all_reduce) return;
    for (int piece = 0; piece < num_tiles_; ++piece)
      for (const int guest : hosts_.guests(rank_))
        results_.push_back(
            {{guest, piece},
             operation_->receive(Hop::second, wire_place(rank_, {guest, piece}), guest)});
  }

  /// Hands on the tile that was given.
  void post() {
    if (!given_.defined()) return;
    tsan::write(given_.data_ptr(), given_.nbytes());
    given_.reset();
    if (const int station = station_of(tile_.owner); station != rank_) {
      lease_.post(station, post_count(tile_));
    } else if (group_.on_one_host()) {
      if (own_apart_) wait_and_sum();
      if (shape_.all_reduce) lease_.publish_result(1);
    } else if (tile_.owner != rank_) {
      if (own_apart_) wait_and_sum();
      send(Hop::first, tile_, tile_.owner);
    } else {
      if (own_apart_) wait_for_partials();
      operation_->submit([this, piece = tile_.piece] { finish_piece(piece); });
      if (tile_.piece + 1 < num_tiles_) return;
      for (auto& [tile, message] : results_)
        operation_->submit([this, tile = tile, message = std::move(message)]() mutable {
          message.wait();
          const at::Tensor place = wire_place(rank_, tile);
          tsan::write(place.data_ptr(), place.nbytes());
          lease_.publish_result(result_count(tile));
        });
    }
  }

  void send(Hop hop, const Tile& tile, int peer) {
    const at::Tensor out = wire_place(rank_, tile);
    if (!partials_are_results()) {
      const trace::Span span(trace::Kind::copy, "publish");
      at::Tensor(out).copy_(first_place(rank_, tile));
    }
    operation_->send(hop, out, peer);
  }

  /// Step: the own rows of a piece, once the other hosts' sums are there.
  void finish_piece(int piece) {
    const Tile tile{rank_, piece};
    std::vector<at::Tensor> parts =
        own_apart_ ? partials(tile) : std::vector<at::Tensor>{first_place(rank_, tile)};
    std::size_t number = 0;
    for (int host = 0; host < hosts_.count(); ++host) {
      if (host == hosts_.of(rank_)) continue;
      arrivals_[static_cast<std::size_t>(piece)][number++].wait();
      parts.push_back(arrival_place(host, piece));
    }
    const at::Tensor sum = first_place(rank_, tile);
    {
      const SlotReads reads(parts);
      sum_parts(sum, parts);
    }
    tsan::write(sum.data_ptr(), sum.nbytes());
    if (shape_.all_reduce)
      for (const int host : hosts_.others(rank_))
        send(Hop::second, tile, hosts_.proxy(rank_, host));
    lease_.publish_result(piece + 1);
  }

  void wait_for_partials() const {
    if (ring_) return lease_.wait_posted(previous(), rank_, 1);
    for (const int peer : here_)
      if (peer != rank_) lease_.wait_posted(peer, rank_, post_count(tile_));
  }
  /// What this host's ranks have made of a tile whose station this rank is, but for its own product
  /// where that is added by the matmul; and the bias.
  std::vector<at::Tensor> partials(const Tile& tile) const {
    std::vector<at::Tensor> parts;
    if (ring_) {
      parts.push_back(first_place(rank_, tile));
    } else {
      for (const int peer : here_)
        if (peer != rank_) parts.push_back(place(rank_, tile, peer));
    }
    const at::Tensor first = first_place(rank_, tile);
    if (shape_.bias.defined() && tile.owner == rank_) parts.push_back(shape_.bias.expand_as(first));
    if (own_apart_) parts.push_back(first);
    return parts;
  }
  /// Sums them in the first place.
  void wait_and_sum() const {
    if (lease_.is_stub()) return;
    wait_for_partials();
    const std::vector<at::Tensor> parts = partials(tile_);
    if (parts.size() == 1) return;  // it lies there
    const SlotReads reads(parts);
    const trace::Span span(trace::Kind::copy, "reduce");
    sum_parts(first_place(rank_, tile_), parts);
  }

  /// Makes result_, in the slot if it can stay there; else copies the own rows of a reduce-scatter.
  /// True if it stays.
  bool take_result() {
    const std::vector<std::int64_t> shape{result_rows_, shape_.n};
    if (partials_are_results() && bytes_of(result_rows_) >= kKeepBytes) {
      result_ = kept_slot_tensor(lease_, rank_, 0, shape, dtype_);
      if (result_.defined()) return true;
    }
    result_ = at::empty(shape, at::TensorOptions(shape_.dtype));
    if (!shape_.all_reduce)
      load_from_slot(result_, slot_tensor(lease_, rank_, area(rank_, rank_).first, shape, dtype_));
    return false;
  }

  const Group& group_;
  const Hosts& hosts_;
  const char* name_;
  const int rank_;
  const std::vector<int>& here_;  // ranks of this host
  ReduceShape shape_;
  const bool ring_;
  const at::ScalarType dtype_;  // of partials
  const bool own_apart_;        // see NOTE [partials]
  const int num_tiles_;         // of each owner's rows
  const int num_others_;        // places for partials, without the first one
  const std::int64_t result_rows_;
  SharedMemory::Lease lease_;
  std::vector<Tile> order_;
  std::size_t num_given_ = 0;
  Tile tile_{};       // in work
  at::Tensor given_;  // its accumulator
  struct Arriving {
    Tile tile;
    Message message;
  };
  std::vector<std::vector<Message>> arrivals_;  // by piece: the other hosts' sums for the own rows
  std::vector<Arriving> results_;               // of guests
  at::Tensor result_;
  std::optional<Wire::Operation> operation_;  // between hosts
};

}  // namespace

std::unique_ptr<ReduceStream> make_fused_reduce(const Group& group, const char* name,
                                                ReduceShape shape, bool ring, bool native,
                                                int num_tiles) {
  return std::make_unique<FusedReduce>(group, name, std::move(shape), ring, native, num_tiles);
}

}  // namespace braid
