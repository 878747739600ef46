// The collective matmuls: loops over the tiles of a gather stream or a reduce stream.
#include "braid/ops/collective_matmul.h"

#include <numeric>

#include "braid/comm/collectives.h"
#include "braid/comm/transports.h"
#include "braid/core/check.h"
#include "braid/core/trace.h"
#include "braid/ops/streams.h"
#include "braid/ops/tile_matmul.h"
#include "braid/ops/tuner.h"

namespace braid {
namespace {

/// x as rows: [..., k] -> [rows, k].
at::Tensor as_rows(const char* op, const char* what, const at::Tensor& x) {
  BRAID_CHECK(x.dim() >= 2, op, ": ", what, " has ", x.dim(), " dims, at least 2 are needed");
  return x.detach().reshape({-1, x.size(-1)});
}

void check_weight(const char* op, const at::Tensor& x, const at::Tensor& weight,
                  const at::Tensor& bias) {
  BRAID_CHECK(weight.dim() == 2, op, ": weight has ", weight.dim(), " dims, expected [n, k]");
  BRAID_CHECK(x.size(-1) == weight.size(1), op, ": inner dimensions differ: x has k = ", x.size(-1),
              ", weight has k = ", weight.size(1));
  BRAID_CHECK(x.scalar_type() == weight.scalar_type(), op, ": dtypes differ: x is ",
              x.scalar_type(), ", weight is ", weight.scalar_type());
  BRAID_CHECK(x.is_floating_point(), op, ": x is ", x.scalar_type(), ", a floating type is needed");
  if (!bias.defined()) return;
  BRAID_CHECK(bias.dim() == 1 && bias.size(0) == weight.size(0), op, ": bias has shape ",
              bias.sizes(), ", weight has n = ", weight.size(0));
}

/// The size over all ranks of the dim that is split over them.
std::int64_t whole_features(const Group& group, std::int64_t share, const MatmulOptions& options) {
  return options.whole_features > 0 ? options.whole_features : share * group.size();
}

std::int64_t total(const std::vector<std::int64_t>& rows) {
  return std::reduce(rows.begin(), rows.end());
}

/// How a gathering operation runs; fills in rows (of every rank) where choosing needs them.
int choose_gather(const Group& group, const char* op, const at::Tensor& x_shard, std::int64_t n,
                  const MatmulOptions& options, std::vector<std::int64_t>& rows,
                  const std::function<void(int)>& trial) {
  if (options.mode == Mode::automatic && rows.empty())
    rows = all_gather_rows(group, x_shard.size(0));
  const std::int64_t m = total(rows);
  return tuner::choose(
      group, {op, m, whole_features(group, n, options), x_shard.size(1), x_shard.scalar_type()},
      options, trial);
}

/// Rows of `rows` ranks of a shard with leading dims [t_r, ...] as rows of the flattened shard.
std::vector<std::int64_t> flat_rows(const at::Tensor& x, std::vector<std::int64_t> rows) {
  const std::int64_t inner =
      c10::multiply_integers(x.sizes().slice(1, static_cast<std::size_t>(x.dim()) - 2));
  for (auto& n : rows) n *= inner;
  return rows;
}

/// `rows` of every rank as the caller gave them, checked and flattened; empty if not given.
std::vector<std::int64_t> given_rows(const Group& group, const char* op, const at::Tensor& x_shard,
                                     std::vector<std::int64_t> rows) {
  if (rows.empty()) return rows;
  BRAID_CHECK(rows.size() == static_cast<std::size_t>(group.size()), op, ": rows has ", rows.size(),
              " entries, group ", group.name(), " has ", group.size(), " ranks");
  BRAID_CHECK(rows[static_cast<std::size_t>(group.rank())] == x_shard.size(0), op,
              ": rows of rank ", group.rank(), " are given as ",
              rows[static_cast<std::size_t>(group.rank())], ", its shard has ", x_shard.size(0));
  return flat_rows(x_shard, std::move(rows));
}

/// y [rows, n] with the leading dims of x, the first of which is what the rows make it.
at::Tensor with_leading_dims(const at::Tensor& y, const at::Tensor& x) {
  if (x.dim() == 2) return y;
  auto shape = x.sizes().vec();
  shape.back() = y.size(1);
  const std::int64_t inner =
      c10::multiply_integers(x.sizes().slice(1, static_cast<std::size_t>(x.dim()) - 2));
  shape[0] = inner == 0 ? x.size(0) : y.size(0) / inner;
  return y.view(shape);
}

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
                                     int num_chunks, std::vector<std::int64_t> rows, bool keep) {
  const auto stream = make_gather_stream(group, op, x, num_chunks, std::move(rows));
  const TileMatmul matmul(weight);
  const std::int64_t m = total(stream->rows());
  GatheredMatmul result{at::empty({m, weight.size(0)}, x.options()), {}};
  if (keep && num_chunks != 1) result.x_full = at::empty({m, x.size(1)}, x.options());
  while (const auto tile = stream->next()) {
    const std::int64_t n = tile->data.size(0);
    at::Tensor data = tile->data;
    if (keep && num_chunks == 1) {
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
    const auto run = [&](int num_chunks) {
      result = run_all_gather_matmul(group, op, x, w, bias, num_chunks, rows, keep);
    };
    run(choose_gather(group, op, x, w.size(0), options, rows, run));
  }
  result.y = with_leading_dims(result.y, x_shard);
  if (keep) result.x_full = with_leading_dims(result.x_full, x_shard);
  return result;
}

/// dw (+)= the sum of what `add(dw32, accumulate)` adds, in the dtype of sums.
template <class F>
void through_sum_dtype(at::Tensor& dw, bool accumulate, F&& add) {
  if (dw.scalar_type() == sum_dtype(dw.scalar_type())) return add(dw, accumulate);
  at::Tensor sum = accumulate ? dw.to(at::kFloat) : at::empty(dw.sizes(), at::kFloat);
  add(sum, accumulate);
  dw.copy_(sum);
}

void check_weight_grad(const char* op, const at::Tensor& dy, const at::Tensor& x,
                       const at::Tensor& dw) {
  BRAID_CHECK(dw.dim() == 2 && dw.size(0) == dy.size(-1) && dw.size(1) == x.size(-1), op,
              ": dw has shape ", dw.sizes(), ", dy has n = ", dy.size(-1),
              " and x has k = ", x.size(-1));
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

/// sum (+)= dy^T @ the tiles of the stream.
void add_gathered(GatherStream& stream, const at::Tensor& dy, at::Tensor sum, bool add) {
  BRAID_CHECK_EQ(total(stream.rows()), dy.size(0),
                 "all_gather_wgrad: rows of all shards and of dy");
  while (const auto tile = stream.next()) {
    if (tile->data.size(0) == 0) continue;
    add_weight_grad(dy.narrow(0, tile->begin, tile->data.size(0)), tile->data, sum, add);
    add = true;
  }
  if (!add) sum.zero_();
}

}  // namespace

Pending<void> start_all_gather_wgrad(const Group& group, const at::Tensor& dy,
                                     const at::Tensor& x_shard, const at::Tensor& dw,
                                     bool accumulate, MatmulOptions options,
                                     std::vector<std::int64_t> rows) {
  constexpr const char* kOp = "all_gather_wgrad";
  const trace::Operation operation(kOp);
  const at::Tensor dy_rows = as_rows(kOp, "dy", dy), x = as_rows(kOp, "x_shard", x_shard);
  check_weight_grad(kOp, dy_rows, x, dw);
  rows = given_rows(group, kOp, x_shard, std::move(rows));
  std::shared_ptr<GatherStream> stream;
  if (group.size() > 1) {
    const auto trial = [&](int num_chunks) {
      add_gathered(*make_gather_stream(group, kOp, x, num_chunks, rows), dy_rows,
                   at::empty(dw.sizes(), sum_dtype(dw.scalar_type())), false);
    };
    const int num_chunks = choose_gather(group, kOp, x, dy_rows.size(1), options, rows, trial);
    stream = make_gather_stream(group, kOp, x, num_chunks, rows);
  }
  return Pending<void>([stream, dy_rows, x, target = dw, accumulate]() mutable {
    const trace::Operation finishing(kOp, trace::resumed);
    through_sum_dtype(target, accumulate, [&](at::Tensor sum, bool add) {
      if (stream == nullptr)
        add_weight_grad(dy_rows, x, sum, add);
      else
        add_gathered(*stream, dy_rows, sum, add);
    });
  });
}

void all_gather_wgrad(const Group& group, const at::Tensor& dy, const at::Tensor& x_shard,
                      const at::Tensor& dw, bool accumulate, MatmulOptions options,
                      std::vector<std::int64_t> rows) {
  start_all_gather_wgrad(group, dy, x_shard, dw, accumulate, options, std::move(rows)).wait();
}

at::Tensor all_gather_matmul_backward(const Group& group, const at::Tensor& dy_shard,
                                      const at::Tensor& weight, const at::Tensor& x, bool need_dx,
                                      at::Tensor dw, bool accumulate_dw, at::Tensor db,
                                      MatmulOptions options, std::vector<std::int64_t> rows) {
  constexpr const char* kOp = "all_gather_matmul_backward";
  const trace::Operation operation(kOp);
  const at::Tensor dy = as_rows(kOp, "dy_shard", dy_shard), x_rows = as_rows(kOp, "x", x),
                   w = weight.detach();
  check_weight(kOp, dy, w.t(), {});
  if (dw.defined()) check_weight_grad(kOp, dy, x_rows, dw);
  rows = given_rows(group, kOp, dy_shard, std::move(rows));
  const std::int64_t m = x_rows.size(0);
  at::Tensor dx = need_dx ? at::empty({m, w.size(1)}, dy.options()) : at::Tensor();

  const auto run_into = [&](int num_chunks, at::Tensor dw_sum, bool add, at::Tensor db_sum) {
    std::optional<TileMatmul> matmul;
    if (need_dx) matmul.emplace(w.t());
    if (db_sum.defined()) db_sum.zero_();
    const auto use = [&](const GatheredTile& tile) {
      const std::int64_t n = tile.data.size(0);
      if (n == 0) return;
      if (need_dx) matmul->multiply(tile.data, dx.narrow(0, tile.begin, n), false);
      if (dw_sum.defined())
        add_weight_grad(tile.data, x_rows.narrow(0, tile.begin, n), dw_sum, add);
      add = true;
      if (db_sum.defined()) db_sum.add_(tile.data.sum(0, false, db_sum.scalar_type()));
    };
    if (group.size() == 1) {
      use({0, dy});
    } else {
      const auto stream = make_gather_stream(group, kOp, dy, num_chunks, rows);
      BRAID_CHECK_EQ(total(stream->rows()), m,
                     "all_gather_matmul_backward: rows of all shards of dy and of x");
      while (const auto tile = stream->next()) use(*tile);
    }
    if (dw_sum.defined() && !add) dw_sum.zero_();
  };
  const at::Tensor db_sum =
      db.defined() ? at::empty(db.sizes(), sum_dtype(db.scalar_type())) : at::Tensor();
  const auto run = [&](at::Tensor dw_sum, bool add) {
    int num_chunks = 1;
    if (group.size() > 1)
      num_chunks = choose_gather(group, kOp, dy, w.size(1), options, rows, [&](int chunks) {
        run_into(chunks, dw_sum.defined() ? at::empty_like(dw_sum) : dw_sum, false, db_sum);
      });
    run_into(num_chunks, dw_sum, add, db_sum);
  };
  if (dw.defined())
    through_sum_dtype(dw, accumulate_dw, run);
  else
    run({}, false);
  if (db.defined()) db.add_(db_sum);
  return need_dx ? with_leading_dims(dx, x) : dx;
}

namespace {

Pending<at::Tensor> start_reducing(const Group& group, const char* op, const at::Tensor& x,
                                   const at::Tensor& weight, const at::Tensor& bias,
                                   const MatmulOptions& options, bool all_reduce) {
  const trace::Operation operation(op);
  const at::Tensor rows = as_rows(op, "x", x), w = weight.detach();
  check_weight(op, rows, w, bias);
  if (group.size() == 1) {
    const at::Tensor y = with_leading_dims(multiply_whole(rows, w, bias), x);
    return Pending<at::Tensor>([y] { return y; });
  }
  ReduceShape shape{flat_rows(x, split_rows(x.size(0), group.size())), w.size(0), x.scalar_type(),
                    bias.defined() ? bias.detach() : bias, all_reduce};
  if (all_reduce) shape.rows = split_rows(rows.size(0), group.size());
  const auto multiply_until_wait = [rows](ReduceStream& stream, const TileMatmul& matmul,
                                          bool to_end) {
    while (to_end || !stream.next_waits()) {
      const auto tile = stream.next();
      if (!tile) return;
      matmul.multiply(rows.narrow(0, tile->begin, tile->rows), tile->out, tile->accumulate);
    }
  };
  const auto start = [&, op](int num_chunks) {
    std::shared_ptr<ReduceStream> stream = make_reduce_stream(group, op, shape, num_chunks);
    const auto matmul = std::make_shared<TileMatmul>(w);
    multiply_until_wait(*stream, *matmul, false);
    return Pending<at::Tensor>([stream, matmul, x, multiply_until_wait, op] {
      const trace::Operation finishing(op, trace::resumed);
      multiply_until_wait(*stream, *matmul, true);
      return with_leading_dims(stream->finish(), x);
    });
  };
  return start(tuner::choose(
      group,
      {op, rows.size(0), w.size(0), whole_features(group, w.size(1), options), x.scalar_type()},
      options, [&](int num_chunks) { (void)start(num_chunks).wait(); }));
}

}  // namespace

Pending<at::Tensor> start_matmul_reduce_scatter(const Group& group, const at::Tensor& x,
                                                const at::Tensor& weight, const at::Tensor& bias,
                                                MatmulOptions options) {
  return start_reducing(group, "matmul_reduce_scatter", x, weight, bias, options, false);
}

at::Tensor matmul_reduce_scatter(const Group& group, const at::Tensor& x, const at::Tensor& weight,
                                 const at::Tensor& bias, MatmulOptions options) {
  return start_matmul_reduce_scatter(group, x, weight, bias, options).wait();
}

Pending<at::Tensor> start_matmul_all_reduce(const Group& group, const at::Tensor& x,
                                            const at::Tensor& weight, const at::Tensor& bias,
                                            MatmulOptions options) {
  return start_reducing(group, "matmul_all_reduce", x, weight, bias, options, true);
}

at::Tensor matmul_all_reduce(const Group& group, const at::Tensor& x, const at::Tensor& weight,
                             const at::Tensor& bias, MatmulOptions options) {
  return start_matmul_all_reduce(group, x, weight, bias, options).wait();
}

}  // namespace braid
