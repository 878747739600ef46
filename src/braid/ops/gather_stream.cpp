// Gather streams by chunks of all-gathers.
#include <deque>

#include "braid/comm/collectives.h"
#include "braid/ops/streams.h"

namespace braid {
namespace {

class ChunkGather final : public GatherStream {
 public:
  ChunkGather(const Group& group, const at::Tensor& x_shard, int num_chunks,
              std::vector<std::int64_t> rows)
      : group_(group), x_(x_shard), rows_(std::move(rows)) {
    if (rows_.empty()) rows_ = all_gather_rows(group, x_);
    const int num_parts = useful_chunks(num_chunks, rows_);
    for (const std::int64_t n : rows_) parts_.push_back(split_rows(n, num_parts));
    start_next();
  }
  /// Takes part in the rest when its user gave up: the peers may not have. One chunk after the other,
  /// so that an error of all ranks is met before another one is started.
  ~ChunkGather() override {
    try {
      while (!failed_ && in_flight_.valid()) {
        in_flight_.wait();
        start_next();
      }
    } catch (...) {  // the peers see it too
    }
  }

  const std::vector<std::int64_t>& rows() override { return rows_; }

  std::optional<GatheredTile> next() override {
    while (tiles_.empty()) {
      if (!in_flight_.valid()) return std::nullopt;
      const std::size_t chunk = num_started_ - 1;
      Pending<at::Tensor> current = std::move(in_flight_);
      start_next();
      failed_ = true;
      data_ = current.wait();
      failed_ = false;
      cut(chunk);
    }
    GatheredTile tile = tiles_.front();
    tiles_.pop_front();
    return tile;
  }

 private:
  std::vector<std::int64_t> rows_of(std::size_t chunk) const {
    std::vector<std::int64_t> result;
    for (const auto& parts : parts_) result.push_back(parts[chunk]);
    return result;
  }

  void start_next() {
    if (num_started_ == parts_[0].size()) return;
    const std::size_t chunk = num_started_++;
    const auto& own = parts_[static_cast<std::size_t>(group_.rank())];
    const std::int64_t begin = first_row(own, static_cast<int>(chunk));
    in_flight_ = start_all_gather(group_, x_.narrow(0, begin, own[chunk]), rows_of(chunk));
  }

  /// Tiles of the chunk in data_: one for all when the rows are in the result's order, else one a rank.
  void cut(std::size_t chunk) {
    if (parts_[0].size() == 1) {
      tiles_.push_back({0, data_});
      return;
    }
    std::int64_t from = 0;
    for (std::size_t r = 0; r < parts_.size(); ++r) {
      const std::int64_t n = parts_[r][chunk];
      if (n > 0)
        tiles_.push_back(
            {first_row(rows_, static_cast<int>(r)) + first_row(parts_[r], static_cast<int>(chunk)),
             data_.narrow(0, from, n)});
      from += n;
    }
  }

  const Group& group_;
  at::Tensor x_;
  std::vector<std::int64_t> rows_;
  std::vector<std::vector<std::int64_t>> parts_;  // [rank][chunk]
  std::size_t num_started_ = 0;
  bool failed_ = false;  // a chunk: the rest is not to be started
  Pending<at::Tensor> in_flight_;
  at::Tensor data_;
  std::deque<GatheredTile> tiles_;
};

}  // namespace

std::unique_ptr<GatherStream> make_gather_stream(const Group& group, const char* name,
                                                 const at::Tensor& x_shard, const Plan& plan,
                                                 std::vector<std::int64_t> rows) {
  if (is_fused(group, plan)) {
    if (rows.empty() && !group.on_one_host()) rows = all_gather_rows(group, x_shard);
    return make_fused_gather(group, name, x_shard, std::move(rows), plan.num_chunks);
  }
  return std::make_unique<ChunkGather>(group, x_shard, plan.num_chunks, std::move(rows));
}

}  // namespace braid
