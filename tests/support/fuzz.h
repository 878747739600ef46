// Random collectives and collective matmuls: all ranks draw the same operations, several in flight,
// over two groups; results are held for a while, written to, freed by another thread or after the
// groups. Values are small integers, so that every sum is exact.
#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "braid/comm/collectives.h"
#include "braid/comm/sums.h"
#include "braid/ops/collective_matmul.h"
#include "braid/ops/tuner.h"
#include "tests/support/ranks.h"

namespace braid::test {

/// Frees tensors in a thread of its own.
class Reaper {
 public:
  ~Reaper() {
    {
      const std::lock_guard lock(mutex_);
      ends_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }
  void free(at::Tensor tensor) {
    {
      const std::lock_guard lock(mutex_);
      tensors_.push_back(std::move(tensor));
    }
    wake_.notify_one();
  }

 private:
  void run() {
    for (std::unique_lock lock(mutex_);;) {
      wake_.wait(lock, [this] { return ends_ || !tensors_.empty(); });
      if (tensors_.empty()) return;
      at::Tensor tensor = std::move(tensors_.front());
      tensors_.pop_front();
      lock.unlock();
      tensor.reset();
      lock.lock();
    }
  }
  std::mutex mutex_;
  std::condition_variable wake_;
  bool ends_ = false;
  std::deque<at::Tensor> tensors_;
  std::thread thread_{[this] { run(); }};
};

/// A result and what it must be for as long as it is held.
struct Held {
  at::Tensor result, expected;
  std::string what;

  void check() const {
    ASSERT_EQ(result.sizes(), expected.sizes()) << what;
    ASSERT_EQ(result.scalar_type(), expected.scalar_type()) << what;
    ASSERT_TRUE(at::equal(result, expected)) << what;
  }
};

class Fuzz {
 public:
  Fuzz(const Group& first, const Group& second, unsigned seed)
      : groups_{&first, &second},
        rank_(first.rank()),
        size_(first.size()),
        shared_(seed),
        own_(seed + 77u * static_cast<unsigned>(first.rank() + 1)) {
    tuner::allow_live(false);
  }
  ~Fuzz() { tuner::allow_live(true); }
  Fuzz(const Fuzz&) = delete;
  Fuzz& operator=(const Fuzz&) = delete;

  /// Runs so many operations. Gives the results that are still held then.
  std::deque<Held> run(int num_steps) {
    Reaper reaper;
    std::deque<Held> held;
    for (step_ = 0; step_ < num_steps; ++step_) {
      if (draw(own_, 0, 7) == 0)  // ranks drift apart
        std::this_thread::sleep_for(std::chrono::microseconds(draw(own_, 0, 300)));
      in_flight_.push_back(start());
      while (static_cast<int>(in_flight_.size()) > draw(shared_, 0, 4)) {
        held.push_back(finish());
        held.back().check();
      }
      while (static_cast<int>(held.size()) > draw(own_, 0, 24)) {
        const auto i = static_cast<std::size_t>(draw(own_, 0, static_cast<int>(held.size()) - 1));
        held[i].check();
        if (draw(own_, 0, 1) == 0) held[i].result.fill_(77);  // its owner may
        if (draw(own_, 0, 1) == 0) reaper.free(std::move(held[i].result));
        held.erase(held.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
    while (!in_flight_.empty()) held.push_back(finish());
    for (const Held& each : held) each.check();
    return held;
  }

 private:
  struct Started {
    Pending<at::Tensor> pending;
    at::Tensor expected;
    std::string what;
  };
  using Shape = std::vector<std::int64_t>;

  static int draw(std::mt19937& generator, int least, int most) {
    return least + static_cast<int>(generator() % static_cast<unsigned>(most - least + 1));
  }
  int draw(int least, int most) { return draw(shared_, least, most); }

  Held finish() {
    Started started = std::move(in_flight_.front());
    in_flight_.pop_front();
    return {started.pending.wait(), started.expected, started.what};
  }

  /// The value of `rank` in this step.
  at::Tensor values(int rank, const Shape& shape, at::ScalarType dtype, int salt = 0) const {
    const at::Tensor x = rank_integers(rank + 5 * step_ + 3 * salt, shape, dtype);
    return rank == rank_ && step_ % 3 == 0 && x.dim() == 2 ? x.t().contiguous().t() : x;
  }
  at::Tensor sum_of(const std::function<at::Tensor(int)>& of_rank) const {
    at::Tensor sum = of_rank(0).to(at::kDouble);
    for (int rank = 1; rank < size_; ++rank) sum = sum + of_rank(rank).to(at::kDouble);
    return sum;
  }
  at::Tensor cat_of(const std::function<at::Tensor(int)>& of_rank) const {
    std::vector<at::Tensor> all;
    for (int rank = 0; rank < size_; ++rank) all.push_back(of_rank(rank));
    return at::cat(all);
  }
  at::Tensor own_part(const at::Tensor& x, const Shape& rows) const {
    return x.split_with_sizes(rows)[static_cast<std::size_t>(rank_)].contiguous();
  }
  /// Mostly few, sometimes none, sometimes many.
  std::int64_t draw_rows() {
    if (is_large_) return draw(200, 400);
    const int kind = draw(0, 9);
    return kind == 0 ? 0 : kind < 9 ? draw(1, 9) : draw(200, 400);
  }
  std::int64_t draw_columns() { return is_large_ ? 300 : draw(1, 6); }
  Shape draw_rows_of_ranks() {
    Shape rows;
    for (int rank = 0; rank < size_; ++rank) rows.push_back(draw_rows());
    return rows;
  }
  std::optional<bool> draw_native() {
    const int kind = draw(0, 2);
    return kind == 0 ? std::nullopt : std::optional(kind == 1);
  }
  MatmulOptions draw_options() {
    switch (draw(0, 4)) {
      case 0:
        return {.mode = Mode::serial, .native = draw_native()};
      case 1:
        return {.mode = Mode::chunked, .num_chunks = draw(1, 5), .native = draw_native()};
      case 2:
        return {Mode::automatic};
      default:
        return {.mode = Mode::fused, .ring = draw(0, 2) == 0, .native = draw_native()};
    }
  }

  Started start() {
    const Group& group = *groups_[static_cast<std::size_t>(draw(0, 1))];
    constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble};
    const at::ScalarType dtype = kDtypes[draw(0, 3)];
    const int kind = draw(0, 12);
    is_large_ =
        draw(0, 4) == 0;  // above what is reduced in one shot, and what is copied out of a slot
    Started started =
        kind < 6 ? start_collective(group, kind, dtype) : start_matmul(group, kind, dtype);
    started.what = fmt::format("step {}: {} of {} on group {} of {}, rank {}", step_, started.what,
                               c10::toString(dtype), group.name(), size_, rank_);
    return started;
  }

  Started start_collective(const Group& group, int kind, at::ScalarType dtype) {
    const std::int64_t columns = draw_columns();
    const std::int64_t m = draw_rows();
    const auto x_of = [=, this](int rank) { return values(rank, {m, columns}, dtype); };
    switch (kind) {
      case 0: {
        const Shape rows = draw_rows_of_ranks();
        const auto shard = [=, this](int rank) {
          return values(rank, {rows[static_cast<std::size_t>(rank)], columns}, dtype);
        };
        return {start_all_gather(group, shard(rank_), draw(0, 1) == 0 ? rows : Shape{}),
                cat_of(shard), "all_gather"};
      }
      case 1: {
        Shape rows = split_rows(m, size_);
        std::rotate(rows.begin(), rows.begin() + draw(0, size_ - 1), rows.end());
        return {start_reduce_scatter(group, x_of(rank_), rows),
                own_part(sum_of(x_of), rows).to(dtype), "reduce_scatter"};
      }
      case 2: {
        at::Tensor x = x_of(rank_);
        return {start_all_reduce(group, x, ReduceOp::sum, draw(0, 1) == 0 ? x : at::Tensor()),
                sum_of(x_of).to(dtype), "all_reduce"};
      }
      case 3: {
        at::Tensor largest = x_of(0);
        for (int rank = 1; rank < size_; ++rank) largest = at::maximum(largest, x_of(rank));
        return {start_all_reduce(group, x_of(rank_), ReduceOp::max), largest, "all_reduce, max"};
      }
      case 4:
        return start_all_to_all(group, columns, dtype);
      default: {
        const int root = draw(0, size_ - 1);
        if (draw(0, 3) == 0) barrier(group);
        const at::Tensor y = broadcast(group, x_of(rank_), root);
        return {Pending<at::Tensor>([y] { return y; }), x_of(root), "broadcast"};
      }
    }
  }

  Started start_all_to_all(const Group& group, std::int64_t columns, at::ScalarType dtype) {
    std::vector<Shape> rows;  // [source][target]
    for (int rank = 0; rank < size_; ++rank) rows.push_back(draw_rows_of_ranks());
    const auto x_of = [&](int rank) {
      const Shape& sent = rows[static_cast<std::size_t>(rank)];
      return values(rank, {std::accumulate(sent.begin(), sent.end(), std::int64_t{0}), columns},
                    dtype);
    };
    Shape received;
    for (const Shape& sent : rows) received.push_back(sent[static_cast<std::size_t>(rank_)]);
    const at::Tensor expected = cat_of(
        [&](int rank) { return own_part(x_of(rank), rows[static_cast<std::size_t>(rank)]); });
    return {braid::start_all_to_all(group, x_of(rank_), rows[static_cast<std::size_t>(rank_)],
                                    received),
            expected, "all_to_all"};
  }

  Started start_matmul(const Group& group, int kind, at::ScalarType dtype) {
    const MatmulOptions options = draw_options();
    // Few products in a half sum: it stays exact.
    const std::int64_t k = draw(1, 4), n = draw_columns();
    const std::int64_t m = draw_rows();
    const Shape rows = draw_rows_of_ranks();
    const bool bias = draw(0, 1) == 0;
    const at::Tensor b = bias ? values(0, {n}, dtype, 9) : at::Tensor();
    const auto with_bias = [&](const at::Tensor& y) { return (bias ? y + b : y).to(dtype); };
    const auto shard = [&](int rank) {
      return values(rank, {rows[static_cast<std::size_t>(rank)], k}, dtype);
    };
    const auto product = [](const at::Tensor& x, const at::Tensor& w) {
      return x.to(at::kDouble).mm(w.to(at::kDouble).t());
    };
    const auto x_of = [&](int rank) { return values(rank, {m, k}, dtype); };
    const auto w_of = [&](int rank) { return values(rank, {n, k}, dtype, 1); };
    const auto partial = [&](int rank) { return product(x_of(rank), w_of(rank)); };
    const auto given = [&] { return draw(0, 1) == 0 ? rows : Shape{}; };
    const auto done = [](const at::Tensor& y) { return Pending<at::Tensor>([y] { return y; }); };
    switch (kind) {
      case 6:
        return {done(all_gather_matmul(group, shard(rank_), w_of(rank_), b, options, given())),
                with_bias(product(cat_of(shard), w_of(rank_))), "all_gather_matmul"};
      case 7: {
        const auto y = all_gather_matmul_v2(group, shard(rank_), w_of(rank_), b, options, given());
        EXPECT_TRUE(at::equal(y.x_full, cat_of(shard))) << "x_full in step " << step_;
        return {done(y.y), with_bias(product(cat_of(shard), w_of(rank_))), "all_gather_matmul_v2"};
      }
      case 8: {
        Shape split = split_rows(m, size_);
        std::rotate(split.begin(), split.begin() + draw(0, size_ - 1), split.end());
        return {start_matmul_reduce_scatter(group, x_of(rank_), w_of(rank_), b, options, split),
                with_bias(own_part(sum_of(partial), split)), "matmul_reduce_scatter"};
      }
      case 9:
        return {start_matmul_all_reduce(group, x_of(rank_), w_of(rank_), b, options),
                with_bias(sum_of(partial)), "matmul_all_reduce"};
      case 10: {
        const at::Tensor x_full = cat_of(shard);
        const at::Tensor dy = values(rank_, {x_full.size(0), n}, dtype, 2);
        const Gradient dw = draw_gradient({n, k}, dtype, product(dy.t(), x_full.t()));
        auto pending = std::make_shared<Pending<void>>(start_all_gather_wgrad(
            group, dy, shard(rank_), dw.into, dw.accumulates, options, given()));
        return {Pending<at::Tensor>([pending, into = dw.into] {
                  pending->wait();
                  return into;
                }),
                dw.expected, "all_gather_wgrad"};
      }
      case 11:
        return start_int8_all_reduce(group, m, n, dtype == at::kDouble ? at::kFloat : dtype,
                                     options);
      default: {
        const at::Tensor dy = cat_of(shard), w = values(rank_, {k, n}, dtype, 1),
                         x = values(rank_, {dy.size(0), n}, dtype, 2);
        const bool need_dx = draw(0, 3) != 0, need_dw = draw(0, 3) != 0, need_db = draw(0, 1) == 0;
        const Gradient dw = draw_gradient({k, n}, dtype, product(dy.t(), x.t()));
        const at::Tensor db = values(rank_, {k}, dtype, 3),
                         db_sum = (dy.to(at::kDouble).sum(0) + db).to(dtype);
        const at::Tensor dx = all_gather_matmul_backward(
            group, shard(rank_), w, x, need_dx, need_dw ? dw.into : at::Tensor(), dw.accumulates,
            need_db ? db : at::Tensor(), options, given());
        EXPECT_TRUE(!need_dw || at::equal(dw.into, dw.expected)) << "dw in step " << step_;
        EXPECT_TRUE(!need_db || at::equal(db, db_sum)) << "db in step " << step_;
        EXPECT_EQ(dx.defined(), need_dx);
        return {done(need_dx ? dx : dw.into), need_dx ? product(dy, w.t()).to(dtype) : dw.into,
                "all_gather_matmul_backward"};
      }
    }
  }

  /// A weight gradient's place, in the dtype of sums or of the operands, and what it must be then.
  struct Gradient {
    at::Tensor into, expected;
    bool accumulates;
  };
  Gradient draw_gradient(const Shape& shape, at::ScalarType dtype, const at::Tensor& sum) {
    if (draw(0, 1) == 0) dtype = sum_dtype(dtype);
    const at::Tensor before = values(rank_, shape, dtype, 4).contiguous();
    const bool accumulates = draw(0, 1) == 0;
    return {before, (accumulates ? sum + before : sum).to(dtype), accumulates};
  }

  /// Scales, of the tensor, of channels or of pairs of columns, are powers of two: all products are exact.
  Started start_int8_all_reduce(const Group& group, std::int64_t m, std::int64_t n,
                                at::ScalarType dtype, const MatmulOptions& options) {
    const std::int64_t k = draw(1, 4), granularity = draw(0, 2);
    const Shape shape = granularity == 0   ? Shape{1}
                        : granularity == 1 ? Shape{n}
                                           : Shape{n, (k + 1) / 2};
    const bool has_zero_points = draw(0, 1) == 0, bias = draw(0, 1) == 0;
    const auto small = [&](int rank, const Shape& of, int most, int salt) {
      return rank_integers(rank + 5 * step_ + salt, of).clamp(-most, most);
    };
    const auto w_of = [&](int rank) {
      return Int8Weight(small(rank, {n, k}, 2, 1).to(at::kChar), small(rank, shape, 1, 2).exp2(),
                        has_zero_points ? small(rank, shape, 1, 3) : at::Tensor(),
                        granularity == 2 ? 2 : 0);
    };
    const auto x_of = [&](int rank) { return values(rank, {m, k}, dtype); };
    at::Tensor sum = sum_of([&](int rank) {
      return x_of(rank).to(at::kDouble).mm(w_of(rank).dequantize(at::kDouble).t());
    });
    const at::Tensor b = bias ? values(0, {n}, dtype, 9) : at::Tensor();
    if (bias) sum = sum + b;
    return {start_matmul_all_reduce(group, x_of(rank_), w_of(rank_), b, options), sum.to(dtype),
            "matmul_all_reduce, int8"};
  }

  std::array<const Group*, 2> groups_;
  int rank_, size_, step_ = 0;
  std::mt19937 shared_, own_;  // the same on all ranks; this rank's
  bool is_large_ = false;      // this step
  std::deque<Started> in_flight_;
};

}  // namespace braid::test
