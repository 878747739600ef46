// The collective matmuls' forward: loops over the tiles of a gather stream or a reduce stream.
#include "braid/ops/collective_matmul.h"

#include "braid/core/trace.h"
#include "braid/ops/operands.h"
#include "braid/ops/streams.h"
#include "braid/ops/tile_matmul.h"

namespace braid {
namespace {

/// One product with a prefilled bias: y = x @ weight^T + bias.
void multiply_rows(const TileMatmul& matmul, const at::Tensor& x, const at::Tensor& bias,
                   at::Tensor out) {
  const bool prefill = bias.defined() && out.scalar_type() == sum_dtype(out.scalar_type());
  if (prefill) out.copy_(bias.expand_as(out));
  matmul.multiply(x, out, prefill);
  if (bias.defined() && !prefill) out.add_(bias);
}

at::Tensor multiply_whole(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  at::Tensor y = at::empty({x.size(0), weight.size(0)}, x.options());
  multiply_rows(TileMatmul(weight), x, bias, y);
  return y;
}

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
    multiply_rows(matmul, data, bias, result.y.narrow(0, tile->begin, n));
  }
  return result;
}

GatheredMatmul all_gather_matmul(const Group& group, const char* op, const at::Tensor& x_shard,
                                 const at::Tensor& weight, const at::Tensor& bias,
                                 const MatmulOptions& options, std::vector<std::int64_t> rows,
                                 bool keep) {
  const trace::Operation operation(op);
  const at::Tensor x = as_rows(op, "x_shard", x_shard), w = weight.detach();
  check_weight(op, x, w, bias);
  rows = given_rows(group, op, x_shard, std::move(rows));
  GatheredMatmul result;
  if (group.size() == 1) {
    result = {multiply_whole(x, w, bias), keep ? x : at::Tensor()};
  } else {
    const auto run = [&](const Plan& plan) {
      result = run_all_gather_matmul(group, op, x, w, bias, plan, rows, keep);
    };
    run(choose_gather(group, op, x, w.size(0), has_native_form(x), options, rows, run));
  }
  result.y = with_leading_dims(result.y, x_shard);
  if (keep) result.x_full = with_leading_dims(result.x_full, x_shard);
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

Pending<at::Tensor> start_reducing(const Group& group, const char* op, const at::Tensor& x,
                                   const at::Tensor& weight, const at::Tensor& bias,
                                   const MatmulOptions& options, bool all_reduce,
                                   std::vector<std::int64_t> split) {
  const trace::Operation operation(op);
  const at::Tensor rows = as_rows(op, "x", x), w = weight.detach();
  check_weight(op, rows, w, bias);
  check_split(group, op, x, split);
  if (group.size() == 1) {
    const at::Tensor y = with_leading_dims(multiply_whole(rows, w, bias), x);
    return Pending<at::Tensor>([y] { return y; });
  }
  if (!all_reduce)
    split = flat_rows(x, split.empty() ? split_rows(x.size(0), group.size()) : std::move(split));
  else
    split = split_rows(rows.size(0), group.size());
  const ReduceShape shape{std::move(split), w.size(0), x.scalar_type(),
                          bias.defined() ? bias.detach() : bias, all_reduce};
  const auto multiply_until_wait = [rows](ReduceStream& stream, const TileMatmul& matmul,
                                          bool to_end) {
    while (to_end || !stream.next_waits()) {
      const auto tile = stream.next();
      if (!tile) return;
      matmul.multiply(rows.narrow(0, tile->begin, tile->rows), tile->out, tile->accumulate);
    }
  };
  const auto start = [&, op](const Plan& plan) {
    std::shared_ptr<ReduceStream> stream = make_reduce_stream(group, op, shape, plan);
    const auto matmul = std::make_shared<TileMatmul>(w, plan.native);
    multiply_until_wait(*stream, *matmul, false);
    return Pending<at::Tensor>([stream, matmul, x, multiply_until_wait, op] {
      const trace::Operation finishing(op, trace::resumed);
      multiply_until_wait(*stream, *matmul, true);
      return with_leading_dims(stream->finish(), x);
    });
  };
  return start(tuner::choose(
      group,
      {op, rows.size(0), w.size(0), whole_features(group, w.size(1), options), x.scalar_type(),
       /*reduces=*/true, has_native_form(x)},
      options, [&](const Plan& plan) { (void)start(plan).wait(); }));
}

}  // namespace

Pending<at::Tensor> start_matmul_reduce_scatter(const Group& group, const at::Tensor& x,
                                                const at::Tensor& weight, const at::Tensor& bias,
                                                MatmulOptions options,
                                                std::vector<std::int64_t> rows) {
  return start_reducing(group, "matmul_reduce_scatter", x, weight, bias, options, false,
                        std::move(rows));
}

at::Tensor matmul_reduce_scatter(const Group& group, const at::Tensor& x, const at::Tensor& weight,
                                 const at::Tensor& bias, MatmulOptions options,
                                 std::vector<std::int64_t> rows) {
  return start_matmul_reduce_scatter(group, x, weight, bias, options, std::move(rows)).wait();
}

Pending<at::Tensor> start_matmul_all_reduce(const Group& group, const at::Tensor& x,
                                            const at::Tensor& weight, const at::Tensor& bias,
                                            MatmulOptions options) {
  return start_reducing(group, "matmul_all_reduce", x, weight, bias, options, true, {});
}

at::Tensor matmul_all_reduce(const Group& group, const at::Tensor& x, const at::Tensor& weight,
                             const at::Tensor& bias, MatmulOptions options) {
  return start_matmul_all_reduce(group, x, weight, bias, options).wait();
}

}  // namespace braid
