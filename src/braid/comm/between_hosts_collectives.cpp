// Collectives between hosts, over the fused streams: a byte crosses the wire once a host.
#include <algorithm>
#include <numeric>

#include "braid/comm/streams.h"
#include "braid/comm/transports.h"
#include "braid/core/trace.h"

namespace braid::between_hosts {
namespace {

// All-reduces up to here, and maxima, gather all inputs (one hop); larger sums scatter and gather parts.
constexpr std::size_t kGatherBytes = 64 << 10;
// So much of a rank's rows travels at once, about.
constexpr std::size_t kPieceBytes = 1 << 20;

int num_pieces(std::size_t bytes) {
  return static_cast<int>(std::clamp<std::size_t>(bytes / kPieceBytes, 1, kMaxChunks));
}

std::vector<std::int64_t> ones(const Group& group) {
  return std::vector<std::int64_t>(static_cast<std::size_t>(group.size()), 1);
}

/// x [rows, elements of a row].
at::Tensor flat(const at::Tensor& x) {
  return x.contiguous().view({x.dim() == 0 ? 1 : x.size(0), row_elements(x)});
}

/// What `f` makes of an operation's result.
template <class F>
Pending<at::Tensor> then(Pending<at::Tensor> pending, F f) {
  return Pending<at::Tensor>([started = std::make_shared<Pending<at::Tensor>>(std::move(pending)),
                              f = std::move(f)]() mutable { return f(started->wait()); });
}

/// A gather that was started: writes all rows into out when it is waited for.
Pending<at::Tensor> finish_gather(const char* op, std::shared_ptr<GatherStream> stream,
                                  at::Tensor out, at::Tensor flat_out) {
  return Pending<at::Tensor>(
      [op, stream = std::move(stream), out = std::move(out), flat_out = std::move(flat_out)] {
        const trace::Operation operation(op, trace::resumed);
        while (const auto tile = stream->next()) {
          const trace::Span span(trace::Kind::copy, "fetch");
          flat_out.narrow(0, tile->begin, tile->data.size(0)).copy_(tile->data);
        }
        return out;
      });
}

/// Hands the rows of x to a reduction.
Pending<at::Tensor> start_reduction(const Group& group, const char* op, const at::Tensor& x,
                                    ReduceShape shape) {
  const std::size_t largest =
      static_cast<std::size_t>(*std::max_element(shape.rows.begin(), shape.rows.end()) * shape.n);
  std::shared_ptr<ReduceStream> stream = make_fused_reduce(
      group, op, std::move(shape), false, false, num_pieces(largest * x.element_size()));
  while (const auto tile = stream->next()) {
    const trace::Span span(trace::Kind::copy, "publish");
    const at::Tensor rows = x.narrow(0, tile->begin, tile->rows);
    at::Tensor out = tile->out;
    if (tile->accumulate)
      out.add_(rows);
    else
      out.copy_(rows);
  }
  return Pending<at::Tensor>([op, stream] {
    const trace::Operation operation(op, trace::resumed);
    return stream->finish();
  });
}

}  // namespace

Pending<at::Tensor> start_all_gather(const Group& group, const at::Tensor& x_shard,
                                     std::vector<std::int64_t> rows) {
  if (rows.empty()) rows = all_gather_rows(group, x_shard);
  const at::Tensor out =
      at::empty(with_rows(x_shard, std::reduce(rows.begin(), rows.end())), x_shard.options());
  return finish_gather("all_gather",
                       make_fused_gather(group, "all_gather", flat(x_shard), std::move(rows), 1),
                       out, flat(out));
}

Pending<at::Tensor> start_reduce_scatter(const Group& group, const at::Tensor& x,
                                         std::vector<std::int64_t> rows) {
  const auto sizes = with_rows(x, rows[static_cast<std::size_t>(group.rank())]);
  ReduceShape shape{std::move(rows), row_elements(x), x.scalar_type()};
  return then(start_reduction(group, "reduce_scatter", flat(x), std::move(shape)),
              [x, sizes](const at::Tensor& own) { return own.view(sizes); });
}

Pending<at::Tensor> start_all_reduce(const Group& group, const at::Tensor& x, ReduceOp op,
                                     at::Tensor out) {
  constexpr const char* kOp = "all_reduce";
  auto give = [out, sizes = x.sizes().vec()](const at::Tensor& sum) mutable {
    return out.defined() ? out.copy_(sum.view(sizes)) : sum.view(sizes);
  };
  if (op == ReduceOp::sum && x.nbytes() > kGatherBytes) {
    ReduceShape shape{split_rows(x.numel(), group.size()), 1, x.scalar_type()};
    shape.all_reduce = true;
    return then(start_reduction(group, kOp, x.contiguous().view({-1, 1}), std::move(shape)),
                [x, give](const at::Tensor& sum) mutable { return give(sum); });
  }
  const at::Tensor all = at::empty({group.size(), x.numel()}, x.options());
  auto pending = finish_gather(
      kOp, make_fused_gather(group, kOp, x.contiguous().view({1, x.numel()}), ones(group), 1), all,
      all);
  return then(std::move(pending), [x, op, give](const at::Tensor& inputs) mutable {
    if (op == ReduceOp::max) return give(inputs.amax(0));
    const at::Tensor sum = at::empty({x.numel()}, x.options());
    sum_parts(sum, inputs.unbind(0));
    return give(sum);
  });
}

at::Tensor broadcast(const Group& group, const at::Tensor& x, int root) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(group.size()), 0);
  rows[static_cast<std::size_t>(root)] = 1;
  const at::Tensor out = at::empty_like(x, at::MemoryFormat::Contiguous);
  const at::Tensor row = x.contiguous().view({1, x.numel()});
  return finish_gather("broadcast",
                       make_fused_gather(group, "broadcast",
                                         row.narrow(0, 0, group.rank() == root ? 1 : 0), rows, 1),
                       out, out.view({1, x.numel()}))
      .wait();
}

void barrier(const Group& group) {
  const at::Tensor mine = at::zeros({1, 1}, at::kByte);
  const at::Tensor all = at::empty({group.size(), 1}, at::kByte);
  (void)finish_gather("barrier", make_fused_gather(group, "barrier", mine, ones(group), 1), all,
                      all)
      .wait();
}

}  // namespace braid::between_hosts

const braid::Transport braid::kBetweenHosts{
    between_hosts::start_all_gather, between_hosts::start_reduce_scatter,
    between_hosts::start_all_reduce, start_all_to_all_parts,
    between_hosts::broadcast,        between_hosts::barrier};
