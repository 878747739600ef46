// The collective matmuls' forward: loops over the tiles of a gather stream or a reduce stream.
#include "braid/ops/collective_matmul.h"

#include <type_traits>

#include "braid/core/trace.h"
#include "braid/ops/operands.h"
#include "braid/ops/streams.h"
#include "braid/ops/tile_matmul.h"

namespace braid {
namespace {

GatheredMatmul run_all_gather_matmul(const Group& group, const char* op, const at::Tensor& x,
                                     const at::Tensor& weight, const at::Tensor& bias,
                                     const Plan& plan, std::vector<std::int64_t> rows, bool keep) {
  const auto stream = make_gather_stream(group, op, x, plan, std::move(rows));
  const TileMatmul matmul(weight, plan.native);
  const std::int64_t m = total(stream->rows());
  GatheredMatmul result{at::empty({m, weight.size(0)}, x.options()), {}};
  if (keep && plan.num_chunks != 1) result.x_full = at::empty({m, x.size(1)}, x.options());
  while (const auto tile = stream->next()) {
    const std::int64_t n = tile->data.size(0);
    at::Tensor data = tile->data;
    if (keep && plan.num_chunks == 1) {
      result.x_full = data;
    } else if (keep) {
      const trace::Span span(trace::Kind::copy, "keep");
      data = result.x_full.narrow(0, tile->begin, n).copy_(data);
    }
    matmul.multiply(data, result.y.narrow(0, tile->begin, n), false, bias);
  }
  return result;
}

GatheredMatmul all_gather_matmul(const Group& group, const char* op, const at::Tensor& x_shard,
                                 const at::Tensor& weight, const at::Tensor& bias,
                                 const MatmulOptions& options, std::vector<std::int64_t> rows,
                                 bool keep) {
  const trace::Operation operation(op);
  const at::Tensor x = as_rows(op, "x_shard", x_shard), w = weight.detach();
  const at::Tensor b = bias.defined() ? bias.detach() : bias;
  check_weight(op, x, w, b);
  rows = given_rows(group, op, x_shard, std::move(rows));
  GatheredMatmul result;
  if (group.size() == 1) {
    result = {multiply_whole(x, w, b), keep ? x.clone() : at::Tensor()};
  } else {
    const auto run = [&](const Plan& plan) {
      result = run_all_gather_matmul(group, op, x, w, b, plan, rows, keep);
    };
    run(choose_gather(group, op, x, w.size(0), has_native_form(x), options, rows, run));
  }
  result.y = with_leading_dims(result.y, x_shard.sizes());
  if (keep) result.x_full = with_leading_dims(result.x_full, x_shard.sizes());
  return result;
}

}  // namespace

at::Tensor all_gather_matmul(const Group& group, const at::Tensor& x_shard,
                             const at::Tensor& weight, const at::Tensor& bias,
                             MatmulOptions options, std::vector<std::int64_t> rows) {
  return all_gather_matmul(group, "all_gather_matmul", x_shard, weight, bias, options,
                           std::move(rows), false)
      .y;
}

GatheredMatmul all_gather_matmul_v2(const Group& group, const at::Tensor& x_shard,
                                    const at::Tensor& weight, const at::Tensor& bias,
                                    MatmulOptions options, std::vector<std::int64_t> rows) {
  return all_gather_matmul(group, "all_gather_matmul_v2", x_shard, weight, bias, options,
                           std::move(rows), true);
}

namespace {

/// A matmul whose products are summed over the ranks.
class ReducedMatmul {
 public:
  template <class Weight>  // at::Tensor or Int8Weight
  ReducedMatmul(const Group& group, const char* op, const at::Tensor& x, const Weight& weight,
                const at::Tensor& bias, const MatmulOptions& options, bool all_reduce,
                std::vector<std::int64_t> split = {})
      : group_(group),
        op_(op),
        sizes_(x.sizes().vec()),
        x_(as_rows(op, "x", x)),
        weight_(weight),
        options_(options) {
    check_weight(op, x_, weight, bias);
    check_split(group, op, x, split);
    if (all_reduce)
      shape_.rows = split_rows(x_.size(0), group.size());
    else
      shape_.rows =
          flat_rows(x, split.empty() ? split_rows(x.size(0), group.size()) : std::move(split));
    shape_.all_reduce = all_reduce;
    shape_.dtype = x.scalar_type();
    if (bias.defined()) shape_.bias = bias.detach();
    if constexpr (std::is_same_v<Weight, Int8Weight>)
      shape_.n = weight.n();
    else
      shape_.n = weight.size(0);
  }

  Plan plan() const {
    const bool has_native = weight_.index() == 0 && has_native_form(x_);
    return tuner::choose(group_,
                         {op_, x_.size(0), shape_.n, whole_features(group_, x_.size(1), options_),
                          shape_.dtype, /*reduces=*/true, has_native},
                         options_, [this](const Plan& plan) { (void)start(plan).wait(); });
  }

  Pending<at::Tensor> start(const Plan& plan) const {
    auto started = std::make_shared<Started>(make_reduce_stream(group_, op_, shape_, plan),
                                             TileMatmul(weight_, plan.native), x_);
    started->multiply(/*to_end=*/false);
    return Pending<at::Tensor>([started, op = op_, sizes = sizes_] {
      const trace::Operation finishing(op, trace::resumed);
      started->multiply(/*to_end=*/true);
      return with_leading_dims(started->stream->finish(), sizes);
    });
  }

  Pending<at::Tensor> start() const {
    if (group_.size() > 1) return start(plan());
    const at::Tensor y = with_leading_dims(multiply_whole(x_, weight_, shape_.bias), sizes_);
    return Pending<at::Tensor>([y] { return y; });
  }

 private:
  struct Started {
    Started(std::unique_ptr<ReduceStream> the_stream, TileMatmul the_matmul, at::Tensor the_x)
        : stream(std::move(the_stream)), matmul(std::move(the_matmul)), x(std::move(the_x)) {}
    /// Multiplies tiles until the last one, or until the next would wait for a peer.
    void multiply(bool to_end) {
      while (to_end || !stream->next_waits()) {
        const auto tile = stream->next();
        if (!tile) return;
        const bool is_all = tile->rows == x.size(0);
        matmul.multiply(is_all ? x : x.narrow(0, tile->begin, tile->rows), tile->out,
                        tile->accumulate, tile->bias);
      }
    }
    std::unique_ptr<ReduceStream> stream;
    TileMatmul matmul;
    at::Tensor x;
  };

  const Group& group_;
  const char* op_;
  std::vector<std::int64_t> sizes_;  // of the caller's x
  at::Tensor x_;
  AnyWeight weight_;
  MatmulOptions options_;
  ReduceShape shape_;
};

constexpr const char* kReduceScatter = "matmul_reduce_scatter";
constexpr const char* kAllReduce = "matmul_all_reduce";
constexpr const char* kInt8AllReduce = "matmul_all_reduce_int8";

}  // namespace

Pending<at::Tensor> start_matmul_reduce_scatter(const Group& group, const at::Tensor& x,
                                                const at::Tensor& weight, const at::Tensor& bias,
                                                MatmulOptions options,
                                                std::vector<std::int64_t> rows) {
  const trace::Operation operation(kReduceScatter);
  return ReducedMatmul(group, kReduceScatter, x, weight.detach(), bias, options, false,
                       std::move(rows))
      .start();
}

at::Tensor matmul_reduce_scatter(const Group& group, const at::Tensor& x, const at::Tensor& weight,
                                 const at::Tensor& bias, MatmulOptions options,
                                 std::vector<std::int64_t> rows) {
  return start_matmul_reduce_scatter(group, x, weight, bias, options, std::move(rows)).wait();
}

void tune_matmul_reduce_scatter(const Group& group, const at::Tensor& x, const at::Tensor& weight,
                                MatmulOptions options, std::vector<std::int64_t> rows) {
  const trace::Operation operation(kReduceScatter, trace::resumed);
  if (options.mode == Mode::automatic && group.size() > 1)
    (void)ReducedMatmul(group, kReduceScatter, x, weight.detach(), {}, options, false,
                        std::move(rows))
        .plan();
}

Pending<at::Tensor> start_matmul_all_reduce(const Group& group, const at::Tensor& x,
                                            const at::Tensor& weight, const at::Tensor& bias,
                                            MatmulOptions options) {
  const trace::Operation operation(kAllReduce);
  return ReducedMatmul(group, kAllReduce, x, weight.detach(), bias, options, true).start();
}

at::Tensor matmul_all_reduce(const Group& group, const at::Tensor& x, const at::Tensor& weight,
                             const at::Tensor& bias, MatmulOptions options) {
  return start_matmul_all_reduce(group, x, weight, bias, options).wait();
}

Pending<at::Tensor> start_matmul_all_reduce(const Group& group, const at::Tensor& x,
                                            const Int8Weight& weight, const at::Tensor& bias,
                                            MatmulOptions options) {
  const trace::Operation operation(kInt8AllReduce);
  return ReducedMatmul(group, kInt8AllReduce, x, weight, bias, options, true).start();
}

at::Tensor matmul_all_reduce(const Group& group, const at::Tensor& x, const Int8Weight& weight,
                             const at::Tensor& bias, MatmulOptions options) {
  return start_matmul_all_reduce(group, x, weight, bias, options).wait();
}

}  // namespace braid
