// Reduce streams: into the peers' memory, or by chunks of collectives.
#include <cstring>
#include <deque>
#include <numeric>

#include "braid/comm/collectives.h"
#include "braid/comm/shared_memory.h"
#include "braid/comm/slot_tensor.h"
#include "braid/comm/transports.h"
#include "braid/ops/streams.h"

namespace braid {
namespace {

std::int64_t begin_of(const std::vector<std::int64_t>& rows, int rank) {
  return std::accumulate(rows.begin(), rows.begin() + rank, std::int64_t{0});
}

/// NOTE [direct]. Every writer has its own place in the owner's slot, so no rank waits for a chain.
/// The owner sums the partials in rank order and its own product onto them, in the dtype of sums:
/// an order that depends on (owner, ranks) alone. Cost: each rank writes (R-1)/R and reads (R-1)/R
/// of m * n elements; with two ranks the product is added by the matmul.
class PeerReduce final : public ReduceStream {
 public:
  PeerReduce(const Group& group, const char* name, ReduceShape shape)
      : group_(group),
        shape_(std::move(shape)),
        sum_dtype_(sum_dtype(shape_.dtype)),
        lease_(start(name)) {
    lease_.agree();
  }

  std::optional<PartialTile> next() override {
    post();
    if (num_given_ == group_.size()) return std::nullopt;
    owner_ = (group_.rank() + 1 + num_given_++) % group_.size();
    const std::int64_t rows = shape_.rows[static_cast<std::size_t>(owner_)];
    PartialTile tile{begin_of(shape_.rows, owner_), rows, {}, owner_ == group_.rank()};
    tile.out = owner_ == group_.rank() ? own_sum() : partial(owner_, group_.rank());
    given_ = tile.out;
    return tile;
  }

  bool next_waits() const override { return num_given_ == group_.size() - 1; }

  at::Tensor finish() override {
    post();
    if (!shape_.all_reduce) {
      lease_.release();
      return result_;
    }
    for (int step = 0; step < group_.size(); ++step) {
      const int peer = (group_.rank() + step) % group_.size();
      const std::int64_t rows = shape_.rows[static_cast<std::size_t>(peer)];
      lease_.wait_result(peer, 1);
      load_from_slot(result_.narrow(0, begin_of(shape_.rows, peer), rows), first_partial(peer));
    }
    lease_.release();
    return result_;
  }

 private:
  std::int64_t own_rows() const { return shape_.rows[static_cast<std::size_t>(group_.rank())]; }

  SharedMemory::Lease start(const char* name) const {
    Header header;
    std::strncpy(header.op, name, sizeof header.op - 1);
    header.dtype = static_cast<std::int64_t>(shape_.dtype);
    header.n = shape_.n;
    header.rows = std::reduce(shape_.rows.begin(), shape_.rows.end());
    const auto elements = static_cast<std::size_t>((group_.size() - 1) * own_rows() * shape_.n);
    return group_.memory()->start(header, elements * at::elementSize(sum_dtype_));
  }

  /// Where `writer` puts its partial for `owner`: places of the owner's slot, in rank order without
  /// the owner.
  at::Tensor partial(int owner, int writer) const {
    const std::int64_t rows = shape_.rows[static_cast<std::size_t>(owner)];
    const auto place = static_cast<std::size_t>(writer < owner ? writer : writer - 1);
    const std::size_t bytes =
        static_cast<std::size_t>(rows * shape_.n) * at::elementSize(sum_dtype_);
    return slot_tensor(lease_, owner, place * bytes, {rows, shape_.n}, sum_dtype_);
  }
  at::Tensor first_partial(int owner) const { return partial(owner, owner == 0 ? 1 : 0); }

  void post() {
    if (!given_.defined()) return;
    if (owner_ != group_.rank()) {
      tsan::write(given_.data_ptr(), given_.nbytes());
      lease_.post(owner_, 1);
    } else {
      if (shape_.all_reduce) {
        tsan::write(given_.data_ptr(), given_.nbytes());
        lease_.publish_result(1);
      } else if (!result_.is_same(given_)) {
        load_from_slot(result_, given_);
      }
    }
    given_.reset();
  }

  /// The sum of the peers' partials and the bias, to which the own product is still to be added.
  at::Tensor own_sum() {
    for (int peer = 0; peer < group_.size(); ++peer)
      if (peer != group_.rank()) lease_.wait_posted(peer, 1);
    const std::int64_t total = std::reduce(shape_.rows.begin(), shape_.rows.end());
    result_ = at::empty({shape_.all_reduce ? total : own_rows(), shape_.n},
                        at::TensorOptions(shape_.dtype));
    const trace::Span span(trace::Kind::copy, "reduce");
    // In the result where it can be summed there; in the first partial's place where peers read it,
    // or it is rounded later.
    at::Tensor first = first_partial(group_.rank());
    const bool in_place = shape_.all_reduce || sum_dtype_ != shape_.dtype;
    at::Tensor sum = in_place ? first : result_;
    tsan::read(first.data_ptr(), first.nbytes());
    if (shape_.bias.defined())
      at::add_out(sum, first, shape_.bias.to(sum_dtype_));
    else if (!in_place)
      sum.copy_(first);
    for (int peer = 0; peer < group_.size(); ++peer) {
      if (peer == group_.rank() || partial(group_.rank(), peer).data_ptr() == first.data_ptr())
        continue;
      const at::Tensor other = partial(group_.rank(), peer);
      tsan::read(other.data_ptr(), other.nbytes());
      sum.add_(other);
    }
    return sum;
  }

  const Group& group_;
  ReduceShape shape_;
  at::ScalarType sum_dtype_;
  SharedMemory::Lease lease_;
  int num_given_ = 0;
  int owner_ = -1;
  at::Tensor given_;  // the accumulator of the tile in work
  at::Tensor result_;
};

class ChunkReduce final : public ReduceStream {
 public:
  ChunkReduce(const Group& group, ReduceShape shape, int num_chunks)
      : group_(group),
        shape_(std::move(shape)),
        max_in_flight_(group.memory() != nullptr ? 2 : num_chunks) {
    const std::int64_t total = std::reduce(shape_.rows.begin(), shape_.rows.end());
    result_ = at::empty({shape_.all_reduce ? total : own_rows(), shape_.n},
                        at::TensorOptions(shape_.dtype));
    if (shape_.all_reduce)
      parts_ = {split_rows(total, num_chunks)};
    else
      for (const std::int64_t n : shape_.rows) parts_.push_back(split_rows(n, num_chunks));
  }

  std::optional<PartialTile> next() override {
    if (tiles_.empty()) {
      start();
      while (tiles_.empty() && num_cut_ < parts_[0].size()) cut();
      if (tiles_.empty()) return std::nullopt;
    }
    PartialTile tile = tiles_.front();
    tiles_.pop_front();
    return tile;
  }

  bool next_waits() const override { return false; }

  at::Tensor finish() override {
    start();
    while (!in_flight_.empty()) finish_oldest();
    if (shape_.bias.defined()) result_.add_(shape_.bias);
    return result_;
  }

 private:
  struct Started {
    std::int64_t begin, rows;  // of the result
    Pending<at::Tensor> pending;
  };

  std::int64_t own_rows() const { return shape_.rows[static_cast<std::size_t>(group_.rank())]; }
  std::vector<std::int64_t> rows_of(std::size_t chunk) const {
    std::vector<std::int64_t> result;
    for (const auto& parts : parts_) result.push_back(parts[chunk]);
    return result;
  }

  /// Makes the tiles of the next chunk: for a reduce-scatter it takes a part of every owner's rows.
  void cut() {
    const std::size_t chunk = num_cut_++;
    const auto rows = rows_of(chunk);
    const std::int64_t total = std::reduce(rows.begin(), rows.end());
    if (total == 0) return;
    data_ = at::empty({total, shape_.n}, at::TensorOptions(shape_.dtype));
    if (parts_[0].size() == 1) {
      tiles_.push_back({0, total, data_, false});
      return;
    }
    std::int64_t from = 0;
    for (std::size_t r = 0; r < parts_.size(); ++r) {
      const std::int64_t before =
          shape_.all_reduce ? 0 : begin_of(shape_.rows, static_cast<int>(r));
      if (rows[r] > 0)
        tiles_.push_back({before + begin_of(parts_[r], static_cast<int>(chunk)), rows[r],
                          data_.narrow(0, from, rows[r]), false});
      from += rows[r];
    }
  }

  /// Starts the collective of the chunk whose tiles are all done.
  void start() {
    if (!data_.defined()) return;
    if (in_flight_.size() >= static_cast<std::size_t>(max_in_flight_)) finish_oldest();
    const std::size_t chunk = num_cut_ - 1;
    const auto& own = parts_[shape_.all_reduce ? 0 : static_cast<std::size_t>(group_.rank())];
    Started started{begin_of(own, static_cast<int>(chunk)), own[chunk], {}};
    if (shape_.all_reduce)
      started.pending = start_all_reduce(group_, data_, ReduceOp::sum,
                                         result_.narrow(0, started.begin, started.rows));
    else
      started.pending = start_reduce_scatter(group_, data_, rows_of(chunk));
    in_flight_.push_back(std::move(started));
    data_.reset();
  }

  void finish_oldest() {
    Started oldest = std::move(in_flight_.front());
    in_flight_.pop_front();
    const at::Tensor part = oldest.pending.wait();
    if (shape_.all_reduce) return;
    if (parts_[0].size() == 1) {
      result_ = part;
      return;
    }
    const trace::Span span(trace::Kind::copy, "fetch");
    result_.narrow(0, oldest.begin, oldest.rows).copy_(part);
  }

  const Group& group_;
  ReduceShape shape_;
  int max_in_flight_;
  std::vector<std::vector<std::int64_t>> parts_;  // [owner][chunk]; one entry for an all-reduce
  std::size_t num_cut_ = 0;
  at::Tensor data_;  // partial products of the chunk in work
  std::deque<PartialTile> tiles_;
  std::deque<Started> in_flight_;
  at::Tensor result_;
};

}  // namespace

std::unique_ptr<ReduceStream> make_reduce_stream(const Group& group, const char* name,
                                                 ReduceShape shape, int num_chunks) {
  if (num_chunks == 0) return std::make_unique<PeerReduce>(group, name, std::move(shape));
  return std::make_unique<ChunkReduce>(group, std::move(shape), num_chunks);
}

}  // namespace braid
