// Chooses the transport of a collective.
#include "braid/comm/collectives.h"

#include <numeric>

#include "braid/comm/transports.h"
#include "braid/core/check.h"
#include "braid/core/trace.h"

namespace braid {
namespace {

Pending<at::Tensor> done(at::Tensor result) {
  return Pending<at::Tensor>([result] { return result; });
}

const Transport& transport(const Group& group) {
  return group.uses_engine() ? kEngine : group.on_one_host() ? kShared : kBetweenHosts;
}

void check_total(const char* what, const std::vector<std::int64_t>& rows, const at::Tensor& x) {
  BRAID_CHECK_EQ(std::reduce(rows.begin(), rows.end()), x.size(0), what);
}

}  // namespace

void check_rows(const Group& group, const char* op, const char* what,
                const std::vector<std::int64_t>& rows) {
  BRAID_CHECK(rows.size() == static_cast<std::size_t>(group.size()), op, ": ", what, " has ",
              rows.size(), " entries, group ", group.name(), " has ", group.size(), " ranks");
  for (const std::int64_t n : rows) BRAID_CHECK(n >= 0, op, ": ", what, " has an entry of ", n);
}

std::vector<std::int64_t> split_rows(std::int64_t rows, int size) {
  std::vector<std::int64_t> result(static_cast<std::size_t>(size), rows / size);
  for (std::int64_t r = 0; r < rows % size; ++r) ++result[static_cast<std::size_t>(r)];
  return result;
}

std::int64_t first_row(const std::vector<std::int64_t>& rows, int rank) {
  return std::reduce(rows.begin(), rows.begin() + rank);
}

RowRange own_part(const std::shared_ptr<Group>& group, std::int64_t rows) {
  const auto all = split_rows(rows, group ? group->size() : 1);
  const int rank = group ? group->rank() : 0;
  return {first_row(all, rank), all[static_cast<std::size_t>(rank)]};
}

Pending<at::Tensor> start_all_gather(const Group& group, const at::Tensor& x_shard,
                                     std::vector<std::int64_t> rows) {
  BRAID_CHECK(x_shard.dim() >= 1, "all_gather: x_shard has ", x_shard.dim(),
              " dims, at least 1 is needed");
  if (!rows.empty()) {
    check_rows(group, "all_gather", "rows", rows);
    BRAID_CHECK_EQ(rows[static_cast<std::size_t>(group.rank())], x_shard.size(0),
                   "all_gather: this rank's rows");
  }
  if (group.size() == 1) return done(x_shard.clone(at::MemoryFormat::Contiguous));
  const trace::Operation operation("all_gather");
  return transport(group).start_all_gather(group, x_shard.detach(), std::move(rows));
}

Pending<at::Tensor> start_reduce_scatter(const Group& group, const at::Tensor& x,
                                         std::vector<std::int64_t> rows) {
  BRAID_CHECK(x.dim() >= 1, "reduce_scatter: x has ", x.dim(), " dims, at least 1 is needed");
  if (rows.empty()) rows = split_rows(x.size(0), group.size());
  check_rows(group, "reduce_scatter", "rows", rows);
  check_total("reduce_scatter: the sum of rows and the rows of x", rows, x);
  if (group.size() == 1) return done(x.clone(at::MemoryFormat::Contiguous));
  const trace::Operation operation("reduce_scatter");
  return transport(group).start_reduce_scatter(group, x.detach(), std::move(rows));
}

Pending<at::Tensor> start_all_reduce(const Group& group, const at::Tensor& x, ReduceOp op,
                                     at::Tensor out) {
  if (out.defined()) {
    BRAID_CHECK_EQ(out.sizes(), x.sizes(), "all_reduce: shapes of out and x");
    BRAID_CHECK_EQ(out.scalar_type(), x.scalar_type(), "all_reduce: dtypes of out and x");
  }
  if (group.size() == 1) {
    if (!out.defined()) return done(x.clone(at::MemoryFormat::Contiguous));
    if (!out.is_same(x)) out.copy_(x);
    return done(out);
  }
  const trace::Operation operation("all_reduce");
  return transport(group).start_all_reduce(group, x.detach(), op, std::move(out));
}

Prepared prepare_reduce_scatter(const Group& group, at::IntArrayRef sizes, at::ScalarType dtype,
                                std::vector<std::int64_t> rows) {
  if (rows.empty()) rows = split_rows(sizes[0], group.size());
  check_rows(group, "reduce_scatter", "rows", rows);
  BRAID_CHECK_EQ(std::reduce(rows.begin(), rows.end()), sizes[0],
                 "reduce_scatter: the sum of rows and the rows of x");
  if (&transport(group) == &kShared) {
    const trace::Operation operation("reduce_scatter");
    return shared::prepare_reduce_scatter(group, sizes, dtype, std::move(rows));
  }
  const at::Tensor x = at::empty(sizes, at::TensorOptions(dtype));
  return {x, [&group, x, rows = std::move(rows)] { return start_reduce_scatter(group, x, rows); }};
}

Prepared prepare_all_reduce(const Group& group, at::IntArrayRef sizes, at::ScalarType dtype,
                            at::Tensor out) {
  if (&transport(group) == &kShared) {
    const trace::Operation operation("all_reduce");
    return shared::prepare_all_reduce(group, sizes, dtype, ReduceOp::sum, std::move(out));
  }
  const at::Tensor x = at::empty(sizes, at::TensorOptions(dtype));
  return {x, [&group, x, out] { return start_all_reduce(group, x, ReduceOp::sum, out); }};
}

Pending<at::Tensor> start_all_to_all(const Group& group, const at::Tensor& x,
                                     std::vector<std::int64_t> send_rows,
                                     std::vector<std::int64_t> recv_rows) {
  BRAID_CHECK(x.dim() >= 1, "all_to_all: x has ", x.dim(), " dims, at least 1 is needed");
  check_rows(group, "all_to_all", "send_rows", send_rows);
  check_rows(group, "all_to_all", "recv_rows", recv_rows);
  check_total("all_to_all: the sum of send_rows and the rows of x", send_rows, x);
  const auto own = static_cast<std::size_t>(group.rank());
  BRAID_CHECK_EQ(send_rows[own], recv_rows[own], "all_to_all: rows from this rank to itself");
  if (group.size() == 1) return done(x.clone(at::MemoryFormat::Contiguous));
  const trace::Operation operation("all_to_all");
  return transport(group).start_all_to_all(group, x.detach(), std::move(send_rows),
                                           std::move(recv_rows));
}

at::Tensor all_gather(const Group& group, const at::Tensor& x_shard,
                      std::vector<std::int64_t> rows) {
  return start_all_gather(group, x_shard, std::move(rows)).wait();
}
std::vector<std::int64_t> all_gather_rows(const Group& group, const at::Tensor& x_shard) {
  const at::Tensor mine = at::tensor({x_shard.size(0), row_elements(x_shard),
                                      static_cast<std::int64_t>(x_shard.scalar_type())})
                              .view({1, 3});
  const at::Tensor all =
      all_gather(group, mine, std::vector<std::int64_t>(static_cast<std::size_t>(group.size()), 1));
  const auto* first = all.const_data_ptr<std::int64_t>();
  std::vector<std::int64_t> rows;
  for (int peer = 0; peer < group.size(); ++peer) {
    const auto* theirs = first + 3 * peer;
    BRAID_CHECK(theirs[1] == first[1], "all_gather: ranks 0 and ", peer, " of group ", group.name(),
                " disagree in elements a row: ", first[1], " and ", theirs[1]);
    BRAID_CHECK(theirs[2] == first[2], "all_gather: ranks 0 and ", peer, " of group ", group.name(),
                " disagree in dtype: ", c10::toString(static_cast<c10::ScalarType>(first[2])),
                " and ", c10::toString(static_cast<c10::ScalarType>(theirs[2])));
    rows.push_back(theirs[0]);
  }
  return rows;
}
at::Tensor reduce_scatter(const Group& group, const at::Tensor& x, std::vector<std::int64_t> rows) {
  return start_reduce_scatter(group, x, std::move(rows)).wait();
}
at::Tensor all_reduce(const Group& group, const at::Tensor& x, ReduceOp op, at::Tensor out) {
  return start_all_reduce(group, x, op, std::move(out)).wait();
}

at::Tensor broadcast(const Group& group, const at::Tensor& x, int root) {
  BRAID_CHECK(root >= 0 && root < group.size(), "broadcast: root ", root,
              " is not a rank of a group of ", group.size());
  if (group.size() == 1) return x.clone(at::MemoryFormat::Contiguous);
  const trace::Operation operation("broadcast");
  return transport(group).broadcast(group, x.detach(), root);
}

void barrier(const Group& group) {
  if (group.size() == 1) return;
  const trace::Operation operation("barrier");
  transport(group).barrier(group);
}

}  // namespace braid
