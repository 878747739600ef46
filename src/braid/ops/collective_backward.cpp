// The passes that backward needs: weight gradients and input gradients over gathered tiles.
#include <optional>

#include "braid/core/trace.h"
#include "braid/ops/operands.h"
#include "braid/ops/streams.h"
#include "braid/ops/tile_matmul.h"

namespace braid {
namespace {

void check_weight_grad(const char* op, const at::Tensor& dy, const at::Tensor& x,
                       const at::Tensor& dw) {
  BRAID_CHECK(dy.scalar_type() == x.scalar_type(), op, ": dtypes differ: dy is ", dy.scalar_type(),
              ", x is ", x.scalar_type());
  if (!dw.defined()) return;
  BRAID_CHECK(dw.dim() == 2 && dw.size(0) == dy.size(-1) && dw.size(1) == x.size(-1), op,
              ": dw has shape ", dw.sizes(), ", dy has n = ", dy.size(-1),
              " and x has k = ", x.size(-1));
  BRAID_CHECK(
      dw.scalar_type() == sum_dtype(dy.scalar_type()) || dw.scalar_type() == dy.scalar_type(), op,
      ": dw is ", dw.scalar_type(), ", dy is ", dy.scalar_type());
}

/// Rows of all shards, where known, against those of the whole operand.
void check_total(const char* op, const std::vector<std::int64_t>& rows, const char* what,
                 std::int64_t whole) {
  BRAID_CHECK(rows.empty() || total(rows) == whole, op, ": the ranks' shards have ", total(rows),
              " rows, ", what, " has ", whole);
}

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
    const auto trial = [&](const Plan& plan) {
      add_gathered(*make_gather_stream(group, kOp, x, plan, rows), dy_rows,
                   at::empty(dw.sizes(), sum_dtype(dw.scalar_type())), false);
    };
    learn_rows(group, x, options, rows);
    check_total(kOp, rows, "dy", dy_rows.size(0));
    const Plan plan =
        choose_gather(group, kOp, x, dy_rows.size(1), /*has_native=*/false, options, rows, trial);
    stream = make_gather_stream(group, kOp, x, plan, rows);
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
  check_weight_grad(kOp, dy, x_rows, dw);
  BRAID_CHECK(!db.defined() || (db.dim() == 1 && db.size(0) == dy.size(1)), kOp,
              ": db does not have the n = ", dy.size(1), " of dy");
  rows = given_rows(group, kOp, dy_shard, std::move(rows));
  const std::int64_t m = x_rows.size(0);
  learn_rows(group, dy, options, rows);
  check_total(kOp, rows, "x", m);
  at::Tensor dx = need_dx ? at::empty({m, w.size(1)}, dy.options()) : at::Tensor();

  const auto run_into = [&](const Plan& plan, at::Tensor dw_sum, bool add, at::Tensor db_sum) {
    std::optional<TileMatmul> matmul;
    if (need_dx) matmul.emplace(w.t(), plan.native);
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
      const auto stream = make_gather_stream(group, kOp, dy, plan, rows);
      BRAID_CHECK_EQ(total(stream->rows()), m,
                     "all_gather_matmul_backward: rows of all shards of dy and of x");
      while (const auto tile = stream->next()) use(*tile);
    }
    if (dw_sum.defined() && !add) dw_sum.zero_();
  };
  const at::Tensor db_sum =
      db.defined() ? at::empty(db.sizes(), sum_dtype(db.scalar_type())) : at::Tensor();
  const char* const key = need_dx && dw.defined() ? kOp
                          : need_dx               ? "all_gather_matmul_backward_dx"
                                                  : "all_gather_matmul_backward_dw";
  const auto run = [&](at::Tensor dw_sum, bool add) {
    Plan plan;
    plan.native = is_native(dy.scalar_type(), m);
    if (group.size() > 1)
      plan = choose_gather(group, key, dy, w.size(1), need_dx && has_native_form(dy), options, rows,
                           [&](const Plan& candidate) {
                             run_into(candidate, dw_sum.defined() ? at::empty_like(dw_sum) : dw_sum,
                                      false, db_sum);
                           });
    run_into(plan, dw_sum, add, db_sum);
  };
  if (dw.defined())
    through_sum_dtype(dw, accumulate_dw, run);
  else
    run({}, false);
  if (db.defined()) db.add_(db_sum);
  return need_dx ? with_leading_dims(dx, x.sizes()) : dx;
}

}  // namespace braid
