// The process group's own collectives, as torch.distributed's users have them: what braid's are compared with.
#include <algorithm>
#include <numeric>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "braid/comm/transports.h"
#include "braid/core/trace.h"

namespace braid::engine {
namespace {

void wait(const c10::intrusive_ptr<c10d::Work>& work) {
  const trace::Span span(trace::Kind::wait, "wait");
  work->wait();
}

Pending<at::Tensor> done(const at::Tensor& result) {
  return Pending<at::Tensor>([result] { return result; });
}

bool all_equal(const std::vector<std::int64_t>& rows) {
  return std::adjacent_find(rows.begin(), rows.end(), std::not_equal_to<>()) == rows.end();
}

}  // namespace

Pending<at::Tensor> start_all_gather(const Group& group, const at::Tensor& x_shard,
                                     std::vector<std::int64_t> rows) {
  if (rows.empty()) rows = all_gather_rows(group, x_shard);
  const std::int64_t most = *std::max_element(rows.begin(), rows.end());
  at::Tensor mine = x_shard.contiguous(),
             all = at::empty(with_rows(x_shard, most * group.size()), x_shard.options());
  if (!all_equal(rows)) {
    mine = at::zeros(with_rows(x_shard, most), x_shard.options());
    mine.narrow(0, 0, x_shard.size(0)).copy_(x_shard);
  }
  wait(group.backend()._allgather_base(all, mine));
  if (all_equal(rows)) return done(all);
  std::vector<at::Tensor> shards;
  for (int rank = 0; rank < group.size(); ++rank)
    shards.push_back(all.narrow(0, rank * most, rows[static_cast<std::size_t>(rank)]));
  return done(at::cat(shards));
}

Pending<at::Tensor> start_reduce_scatter(const Group& group, const at::Tensor& x,
                                         std::vector<std::int64_t> rows) {
  const std::int64_t own = rows[static_cast<std::size_t>(group.rank())];
  if (!all_equal(rows))
    return done(start_all_reduce(group, x, ReduceOp::sum, {})
                    .wait()
                    .narrow(0, first_row(rows, group.rank()), own)
                    .clone());
  at::Tensor in = x.contiguous(), out = at::empty(with_rows(x, own), x.options());
  wait(group.backend()._reduce_scatter_base(out, in));
  return done(out);
}

Pending<at::Tensor> start_all_reduce(const Group& group, const at::Tensor& x, ReduceOp op,
                                     at::Tensor out) {
  if (!out.defined()) out = at::empty_like(x, at::MemoryFormat::Contiguous);
  if (!out.is_same(x)) out.copy_(x);
  c10d::AllreduceOptions options;
  options.reduceOp = op == ReduceOp::max ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
  std::vector<at::Tensor> tensors{out.is_contiguous() ? out : out.contiguous()};
  wait(group.backend().allreduce(tensors, options));
  if (!tensors[0].is_same(out)) out.copy_(tensors[0]);
  return done(out);
}

Pending<at::Tensor> start_all_to_all(const Group& group, const at::Tensor& x,
                                     std::vector<std::int64_t> send_rows,
                                     std::vector<std::int64_t> recv_rows) {
  at::Tensor in = x.contiguous(),
             out = at::empty(with_rows(x, std::reduce(recv_rows.begin(), recv_rows.end())),
                             x.options());
  wait(group.backend().alltoall_base(out, in, recv_rows, send_rows));
  return done(out);
}

at::Tensor broadcast(const Group& group, const at::Tensor& x, int root) {
  std::vector<at::Tensor> tensors{x.clone()};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  wait(group.backend().broadcast(tensors, options));
  return tensors[0];
}

void barrier(const Group& group) { wait(group.backend().barrier()); }

}  // namespace braid::engine

const braid::Transport braid::kEngine{engine::start_all_gather, engine::start_reduce_scatter,
                                      engine::start_all_reduce, engine::start_all_to_all,
                                      engine::broadcast,        engine::barrier};
