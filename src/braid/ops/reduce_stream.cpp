// Reduce streams: into the peers' memory, or by chunks of collectives.
#include <c10/util/hash.h>

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

/// NOTE [direct]. Every writer has its own place in the owner's slot, so no rank waits for a chain.
/// The owner sums the partials in rank order and its own product onto them, in the dtype of sums: an
/// order that depends on (owner, ranks) alone. Cost: each rank writes (R-1)/R and reads (R-1)/R of
/// m * n elements; with two ranks the product is added by the matmul.
///
/// NOTE [kept result]. Where sums are in the result's dtype, the first partial lies where the
/// owner's rows of the result lie, and a large result stays in the slot and keeps it: nothing is
/// copied but an all-reduce's rows of the peers. As the caller may write into its result, an
/// all-reduce returns it only after all peers have read this rank's rows.
class PeerReduce final : public ReduceStream {
 public:
  PeerReduce(const Group& group, const char* name, ReduceShape shape)
      : group_(group),
        shape_(std::move(shape)),
        sum_dtype_(sum_dtype(shape_.dtype)),
        result_rows_(shape_.all_reduce ? std::reduce(shape_.rows.begin(), shape_.rows.end())
                                       : own_rows()),
        lease_(start(name)) {}

  std::optional<PartialTile> next() override {
    lease_.agree();
    post();
    if (num_given_ == group_.size()) return std::nullopt;
    owner_ = (group_.rank() + 1 + num_given_++) % group_.size();
    PartialTile tile{first_row(shape_.rows, owner_),
                     rows_of(owner_),
                     {},
                     owner_ == group_.rank() && !lease_.is_stub()};
    tile.out = owner_ == group_.rank() ? own_sum() : partial(owner_, group_.rank());
    given_ = tile.out;
    tsan::write(given_.data_ptr(), given_.nbytes());
    return tile;
  }

  /// For the peers' partials; or, before the first tile, for peers that have not come to this operation yet.
  bool next_waits() const override {
    return num_given_ == group_.size() - 1 || (num_given_ == 0 && !lease_.all_have_started());
  }

  at::Tensor finish() override {
    post();
    const bool kept = take_result();
    for (int step = 0; shape_.all_reduce && step < group_.size(); ++step) {
      const int peer = (group_.rank() + step) % group_.size();
      if (kept && (peer == group_.rank() || lease_.is_stub())) continue;
      lease_.wait_result(peer, 1);
      load_from_slot(result_.narrow(0, first_row(shape_.rows, peer), rows_of(peer)),
                     first_partial(peer));
    }
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

  std::int64_t rows_of(int rank) const { return shape_.rows[static_cast<std::size_t>(rank)]; }
  std::int64_t own_rows() const { return rows_of(group_.rank()); }
  bool sums_are_results() const { return sum_dtype_ == shape_.dtype; }
  std::size_t bytes_of(std::int64_t rows) const {
    return static_cast<std::size_t>(rows * shape_.n) * at::elementSize(sum_dtype_);
  }

  SharedMemory::Lease start(const char* name) const {
    Header header;
    std::strncpy(header.op, name, sizeof header.op - 1);
    header.dtype = static_cast<std::int64_t>(shape_.dtype);
    header.n = shape_.n;
    header.rows = std::reduce(shape_.rows.begin(), shape_.rows.end());
    header.set_variant("split of rows (hash)",
                       static_cast<std::int64_t>(c10::get_hash(shape_.rows)));
    return group_.memory()->start(
        header, others_offset(group_.rank()) + bytes_of((group_.size() - 2) * own_rows()));
  }

  /// Where the owner's rows, and so the first partial for them, begin in the owner's slot.
  std::size_t own_offset(int owner) const {
    return shape_.all_reduce && sums_are_results() ? bytes_of(first_row(shape_.rows, owner)) : 0;
  }
  /// Where the other partials begin.
  std::size_t others_offset(int owner) const {
    return shape_.all_reduce && sums_are_results() ? bytes_of(result_rows_)
                                                   : bytes_of(rows_of(owner));
  }
  /// Where `writer` puts its partial for `owner`, in rank order without the owner.
  at::Tensor partial(int owner, int writer) const {
    const int place = writer < owner ? writer : writer - 1;
    const std::size_t offset = place == 0
                                   ? own_offset(owner)
                                   : others_offset(owner) + bytes_of((place - 1) * rows_of(owner));
    return slot_tensor(lease_, owner, offset, {rows_of(owner), shape_.n}, sum_dtype_);
  }
  at::Tensor first_partial(int owner) const { return partial(owner, owner == 0 ? 1 : 0); }

  void post() {
    if (!given_.defined()) return;
    tsan::write(given_.data_ptr(), given_.nbytes());
    if (owner_ != group_.rank())
      lease_.post(owner_, 1);
    else if (shape_.all_reduce)
      lease_.publish_result(1);
    given_.reset();
  }

  /// The sum of the peers' partials and the bias, in the first partial's place: the own product is
  /// still to be added.
  at::Tensor own_sum() {
    at::Tensor sum = first_partial(group_.rank());
    for (int peer = 0; peer < group_.size(); ++peer)
      if (peer != group_.rank()) lease_.wait_posted(peer, 1);
    const trace::Span span(trace::Kind::copy, "reduce");
    tsan::read(sum.data_ptr(), sum.nbytes());
    for (int peer = 0, place = 0; peer < group_.size(); ++peer) {
      if (peer == group_.rank() || place++ == 0) continue;
      const at::Tensor other = partial(group_.rank(), peer);
      tsan::read(other.data_ptr(), other.nbytes());
      sum.add_(other);
    }
    if (shape_.bias.defined()) sum.add_(shape_.bias);
    return sum;
  }

  /// Makes result_, in the slot if it can stay there; else copies the own rows of a reduce-scatter.
  /// True if it stays.
  bool take_result() {
    const std::vector<std::int64_t> shape{result_rows_, shape_.n};
    if (sums_are_results() && bytes_of(result_rows_) >= kKeepBytes) {
      result_ = kept_slot_tensor(lease_, group_.rank(), 0, shape, sum_dtype_);
      if (result_.defined()) return true;
    }
    result_ = at::empty(shape, at::TensorOptions(shape_.dtype));
    if (!shape_.all_reduce) load_from_slot(result_, first_partial(group_.rank()));
    return false;
  }

  const Group& group_;
  ReduceShape shape_;
  at::ScalarType sum_dtype_;
  std::int64_t result_rows_;
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
    const std::vector<std::int64_t> whole =
        shape_.all_reduce ? std::vector<std::int64_t>{total} : shape_.rows;
    const int num_parts = useful_chunks(num_chunks, whole);
    for (const std::int64_t n : whole) parts_.push_back(split_rows(n, num_parts));
  }

  std::optional<PartialTile> next() override {
    if (tiles_.empty()) {
      start();
      while (tiles_.empty() && num_cut_ < parts_[0].size()) cut();
      if (tiles_.empty()) return std::nullopt;  // a whole without rows is started by finish()
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
    if (total == 0 && chunk > 0) return;
    data_ = at::empty({total, shape_.n}, at::TensorOptions(shape_.dtype));
    if (parts_[0].size() == 1) {
      tiles_.push_back({0, total, data_, false});
      return;
    }
    std::int64_t from = 0;
    for (std::size_t r = 0; r < parts_.size(); ++r) {
      const std::int64_t before =
          shape_.all_reduce ? 0 : first_row(shape_.rows, static_cast<int>(r));
      if (rows[r] > 0)
        tiles_.push_back({before + first_row(parts_[r], static_cast<int>(chunk)), rows[r],
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
    Started started{first_row(own, static_cast<int>(chunk)), own[chunk], {}};
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
