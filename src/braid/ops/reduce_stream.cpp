// Reduce streams by chunks of collectives.
#include <deque>
#include <numeric>

#include "braid/comm/collectives.h"
#include "braid/core/trace.h"
#include "braid/ops/streams.h"

namespace braid {
namespace {

class ChunkReduce final : public ReduceStream {
 public:
  ChunkReduce(const Group& group, ReduceShape shape, int num_chunks)
      : group_(group), shape_(std::move(shape)) {
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
  static constexpr std::size_t kMostInFlight = 2;
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
    if (in_flight_.size() >= kMostInFlight) finish_oldest();
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
  if (is_fused(group, plan))
    return make_fused_reduce(group, name, std::move(shape), plan.ring, plan.native,
                             plan.num_chunks);
  return std::make_unique<ChunkReduce>(group, std::move(shape), plan.num_chunks);
}

}  // namespace braid
