// Reduce streams: into the peers' memory, or by chunks of collectives.
#include <c10/util/hash.h>

#include <cstring>
#include <deque>
#include <numeric>

#include "braid/comm/collectives.h"
#include "braid/comm/shared_memory.h"
#include "braid/comm/slot_tensor.h"
#include "braid/comm/sums.h"
#include "braid/ops/streams.h"

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
/// NOTE [partials] are in the dtype of sums. Native half products are rounded when they are made, so
/// they travel as they are; then the owner's own product has a place of its own, too, and all are
/// summed in f32 and rounded once more.
///
/// NOTE [kept result]. Where partials are in the result's dtype, the first one (or the own product)
/// lies where the owner's rows of the result lie, and a large result stays in the slot and keeps it:
/// nothing is copied but an all-reduce's rows of the peers. As the caller may write into its result,
/// an all-reduce returns it only after all peers have read this rank's rows.
class PeerReduce final : public ReduceStream {
 public:
  PeerReduce(const Group& group, const char* name, ReduceShape shape, const Plan& plan)
      : group_(group),
        shape_(std::move(shape)),
        ring_(plan.ring),
        dtype_(plan.native ? shape_.dtype : sum_dtype(shape_.dtype)),
        own_apart_(dtype_ != sum_dtype(dtype_)),
        result_rows_(shape_.all_reduce ? std::reduce(shape_.rows.begin(), shape_.rows.end())
                                       : own_rows()),
        lease_(start(name)) {}

  std::optional<PartialTile> next() override {
    lease_.agree();
    post();
    if (num_given_ == group_.size()) return std::nullopt;
    const int step = num_given_++;
    owner_ = (group_.rank() + (ring_ ? 2 * group_.size() - 1 - step : 1 + step)) % group_.size();
    const bool is_own = owner_ == group_.rank();
    const bool adds = is_own ? !own_apart_ : ring_ && step > 0;
    if (adds && !is_own) lease_.wait_posted(previous(), owner_, 1);
    at::Tensor out = is_own ? own_place() : place(owner_, group_.rank());
    if (adds && is_own) wait_and_sum();
    given_ = out;
    tsan::write(given_.data_ptr(), given_.nbytes());
    return PartialTile{first_row(shape_.rows, owner_), rows_of(owner_), std::move(out),
                       adds && !lease_.is_stub()};
  }

  /// For the peers' partials; or, before the first tile, for peers that have not come to this operation yet.
  bool next_waits() const override {
    if (num_given_ == 0) return !lease_.all_have_started();
    return ring_ || num_given_ >= group_.size() - (own_apart_ ? 0 : 1);
  }

  at::Tensor finish() override {
    post();
    const bool kept = take_result();
    for (int step = 0; shape_.all_reduce && step < group_.size(); ++step) {
      const int peer = (group_.rank() + step) % group_.size();
      if (kept && (peer == group_.rank() || lease_.is_stub())) continue;
      lease_.wait_result(peer, 1);
      load_from_slot(
          result_.narrow(0, first_row(shape_.rows, peer), rows_of(peer)),
          slot_tensor(lease_, peer, own_offset(peer), {rows_of(peer), shape_.n}, dtype_));
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
  int previous() const { return (group_.rank() + group_.size() - 1) % group_.size(); }
  bool partials_are_results() const { return dtype_ == shape_.dtype; }
  std::size_t bytes_of(std::int64_t rows) const {
    return static_cast<std::size_t>(rows * shape_.n) * at::elementSize(dtype_);
  }

  SharedMemory::Lease start(const char* name) const {
    Header header;
    std::strncpy(header.op, name, sizeof header.op - 1);
    header.dtype = static_cast<std::int64_t>(shape_.dtype);
    header.n = shape_.n;
    header.rows = std::reduce(shape_.rows.begin(), shape_.rows.end());
    header.set_variant("split and plan (hash)",
                       static_cast<std::int64_t>(c10::get_hash(shape_.rows, ring_, own_apart_)));
    const int other_places = own_apart_ ? group_.size() - 1 : ring_ ? 0 : group_.size() - 2;
    return group_.memory()->start(
        header, others_offset(group_.rank()) + bytes_of(other_places * own_rows()));
  }

  /// Where the owner's rows, and so the first partial for them or the own product, begin in the owner's slot.
  std::size_t own_offset(int owner) const {
    return shape_.all_reduce && partials_are_results() ? bytes_of(first_row(shape_.rows, owner))
                                                       : 0;
  }
  /// Where the other partials begin.
  std::size_t others_offset(int owner) const {
    return shape_.all_reduce && partials_are_results() ? bytes_of(result_rows_)
                                                       : bytes_of(rows_of(owner));
  }
  /// Where `writer` puts its partial for `owner`: in rank order without the owner.
  at::Tensor place(int owner, int writer) const {
    const int number = ring_ ? 0 : (writer < owner ? writer : writer - 1) + (own_apart_ ? 1 : 0);
    const std::size_t offset = number == 0
                                   ? own_offset(owner)
                                   : others_offset(owner) + bytes_of((number - 1) * rows_of(owner));
    return slot_tensor(lease_, owner, offset, {rows_of(owner), shape_.n}, dtype_);
  }
  at::Tensor own_place() const {
    return slot_tensor(lease_, group_.rank(), own_offset(group_.rank()), {own_rows(), shape_.n},
                       dtype_);
  }

  void post() {
    if (!given_.defined()) return;
    tsan::write(given_.data_ptr(), given_.nbytes());
    if (owner_ != group_.rank()) {
      lease_.post(owner_, 1);
    } else {
      if (own_apart_) wait_and_sum();
      if (shape_.all_reduce) lease_.publish_result(1);
    }
    given_.reset();
  }

  /// Sums the partials that are there, the bias, and the own product where it is apart, in the own place.
  void wait_and_sum() {
    if (lease_.is_stub()) return;
    std::vector<at::Tensor> parts;
    if (ring_) {
      lease_.wait_posted(previous(), group_.rank(), 1);
      parts.push_back(own_place());
    } else {
      for (int peer = 0; peer < group_.size(); ++peer) {
        if (peer == group_.rank()) continue;
        lease_.wait_posted(peer, group_.rank(), 1);
        parts.push_back(place(group_.rank(), peer));
      }
    }
    const SlotReads reads(parts);
    at::Tensor sum = own_place();
    if (shape_.bias.defined()) parts.push_back(shape_.bias.expand_as(sum));
    if (own_apart_) parts.push_back(sum);
    if (parts.size() == 1) return;  // the first partial lies in the own place
    const trace::Span span(trace::Kind::copy, "reduce");
    sum_parts(sum, parts);
  }

  /// Makes result_, in the slot if it can stay there; else copies the own rows of a reduce-scatter.
  /// True if it stays.
  bool take_result() {
    const std::vector<std::int64_t> shape{result_rows_, shape_.n};
    if (partials_are_results() && bytes_of(result_rows_) >= kKeepBytes) {
      result_ = kept_slot_tensor(lease_, group_.rank(), 0, shape, dtype_);
      if (result_.defined()) return true;
    }
    result_ = at::empty(shape, at::TensorOptions(shape_.dtype));
    if (!shape_.all_reduce) load_from_slot(result_, own_place());
    return false;
  }

  const Group& group_;
  ReduceShape shape_;
  bool ring_;
  at::ScalarType dtype_;  // of partials
  bool own_apart_;        // see NOTE [partials]
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
    const std::vector<std::int64_t> whole =
        shape_.all_reduce ? std::vector<std::int64_t>{total_rows()} : shape_.rows;
    const int num_parts = useful_chunks(num_chunks, whole);
    for (const std::int64_t n : whole) parts_.push_back(split_rows(n, num_parts));
    if (num_parts > 1)
      result_ = at::empty({shape_.all_reduce ? total_rows() : own_rows(), shape_.n},
                          at::TensorOptions(shape_.dtype));
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
    return result_;
  }

 private:
  struct Started {
    std::int64_t begin, rows;  // of the result
    Pending<at::Tensor> pending;
  };

  std::int64_t own_rows() const { return shape_.rows[static_cast<std::size_t>(group_.rank())]; }
  std::int64_t total_rows() const { return std::reduce(shape_.rows.begin(), shape_.rows.end()); }
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
    const std::vector<std::int64_t> sizes{total, shape_.n};
    const auto& own = parts_[shape_.all_reduce ? 0 : static_cast<std::size_t>(group_.rank())];
    started_ = {first_row(own, static_cast<int>(chunk)), own[chunk], {}};
    if (shape_.all_reduce)
      reduction_ = prepare_all_reduce(
          group_, sizes, shape_.dtype,
          result_.defined() ? result_.narrow(0, started_.begin, started_.rows) : at::Tensor());
    else
      reduction_ = prepare_reduce_scatter(group_, sizes, shape_.dtype, rows);
    const at::Tensor bias = group_.rank() == 0 ? shape_.bias : at::Tensor();
    if (parts_[0].size() == 1) {
      tiles_.push_back({0, total, reduction_.x, false, bias});
      return;
    }
    std::int64_t from = 0;
    for (std::size_t r = 0; r < parts_.size(); ++r) {
      const std::int64_t before =
          shape_.all_reduce ? 0 : first_row(shape_.rows, static_cast<int>(r));
      if (rows[r] > 0)
        tiles_.push_back({before + first_row(parts_[r], static_cast<int>(chunk)), rows[r],
                          reduction_.x.narrow(0, from, rows[r]), false, bias});
      from += rows[r];
    }
  }

  /// Starts the collective of the chunk whose tiles are all done.
  void start() {
    if (!reduction_.x.defined()) return;
    if (in_flight_.size() >= static_cast<std::size_t>(max_in_flight_)) finish_oldest();
    started_.pending = reduction_.start();
    in_flight_.push_back(std::move(started_));
    reduction_ = {};
  }

  void finish_oldest() {
    Started oldest = std::move(in_flight_.front());
    in_flight_.pop_front();
    const at::Tensor part = oldest.pending.wait();
    if (parts_[0].size() == 1) result_ = part;
    if (shape_.all_reduce || parts_[0].size() == 1) return;
    const trace::Span span(trace::Kind::copy, "fetch");
    result_.narrow(0, oldest.begin, oldest.rows).copy_(part);
  }

  const Group& group_;
  ReduceShape shape_;
  int max_in_flight_;
  std::vector<std::vector<std::int64_t>> parts_;  // [owner][chunk]; one entry for an all-reduce
  std::size_t num_cut_ = 0;
  Prepared reduction_;  // of the chunk in work: takes its partial products
  Started started_;     // the same chunk
  std::deque<PartialTile> tiles_;
  std::deque<Started> in_flight_;
  at::Tensor result_;
};

}  // namespace

std::unique_ptr<ReduceStream> make_reduce_stream(const Group& group, const char* name,
                                                 ReduceShape shape, const Plan& plan) {
  if (plan.num_chunks == 0)
    return std::make_unique<PeerReduce>(group, name, std::move(shape), plan);
  return std::make_unique<ChunkReduce>(group, std::move(shape), plan.num_chunks);
}

}  // namespace braid
