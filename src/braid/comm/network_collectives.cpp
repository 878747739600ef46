// Collectives over the process group.
#include <fmt/format.h>

#include <chrono>
#include <numeric>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "braid/comm/transports.h"
#include "braid/core/trace.h"

namespace braid::network {
namespace {

using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

/// Runs f; what the process group throws becomes a DistBackendError that names the operation.
template <class F>
auto naming(const Group& group, const char* op, F&& f) {
  const auto since = std::chrono::steady_clock::now();
  try {
    return f();
  } catch (const c10::ValueError&) {
    throw;
  } catch (const std::exception& error) {
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - since;
    const auto* ours = dynamic_cast<const c10::Error*>(&error);
    const std::string text = fmt::format(
        "{}: group {} rank {}: {:.3f} s elapsed of at most {:.3f} s: {}", op, group.name(),
        group.rank(), elapsed.count(), std::chrono::duration<double>(group.timeout()).count(),
        ours != nullptr ? ours->what_without_backtrace() : error.what());
    group.lost(text);
    TORCH_CHECK_WITH(DistBackendError, false, text);
    throw;
  }
}

void wait_all(const Group& group, const char* op, const Works& works) {
  const trace::Span span(trace::Kind::wait, "wait");
  naming(group, op, [&] {
    for (const auto& work : works) work->wait(group.timeout());
  });
}

void send(const Group& group, Works& works, const at::Tensor& x, int peer, int tag) {
  std::vector<at::Tensor> message{x};
  works.push_back(group.backend().send(message, peer, tag));
}
void receive(const Group& group, Works& works, const at::Tensor& x, int peer, int tag) {
  std::vector<at::Tensor> message{x};
  works.push_back(group.backend().recv(message, peer, tag));
}

/// Rows of every rank's shard; checks that the rest of the shapes agree.
std::vector<std::int64_t> exchange_rows(const Group& group, const at::Tensor& x) {
  at::Tensor mine =
      at::tensor({x.size(0), row_elements(x), static_cast<std::int64_t>(x.scalar_type())});
  at::Tensor all = at::empty({group.size() * 3}, at::kLong);
  wait_all(
      group, "all_gather",
      {naming(group, "all_gather", [&] { return group.backend()._allgather_base(all, mine); })});
  std::vector<std::int64_t> rows;
  for (int peer = 0; peer < group.size(); ++peer) {
    const auto* header = all.const_data_ptr<std::int64_t>() + 3 * peer;
    const auto* first = all.const_data_ptr<std::int64_t>();
    BRAID_CHECK(header[1] == first[1] && header[2] == first[2], "all_gather: ranks 0 and ", peer,
                " of group ", group.name(), " disagree in elements per row or dtype: ", first[1],
                " ", c10::toString(static_cast<c10::ScalarType>(first[2])), " and ", header[1], " ",
                c10::toString(static_cast<c10::ScalarType>(header[2])));
    rows.push_back(header[0]);
  }
  return rows;
}

}  // namespace

Pending<at::Tensor> start_all_gather(const Group& group, const at::Tensor& x_shard,
                                     std::vector<std::int64_t> rows) {
  if (rows.empty()) rows = exchange_rows(group, x_shard);
  const int tag = group.next_tag();
  at::Tensor out =
      at::empty(with_rows(x_shard, std::reduce(rows.begin(), rows.end())), x_shard.options());
  Works works;
  naming(group, "all_gather", [&] {
    std::int64_t begin = 0;
    for (int peer = 0; peer < group.size(); ++peer) {
      const std::int64_t n = rows[static_cast<std::size_t>(peer)];
      const at::Tensor part = out.narrow(0, begin, n);
      begin += n;
      if (peer == group.rank()) {
        const trace::Span span(trace::Kind::copy, "fetch");
        part.copy_(x_shard);
        continue;
      }
      if (x_shard.numel() > 0) send(group, works, x_shard, peer, tag);
      if (part.numel() > 0) receive(group, works, part, peer, tag);
    }
  });
  return Pending<at::Tensor>([&group, x_shard, out, works] {
    wait_all(group, "all_gather", works);
    return out;
  });
}

Pending<at::Tensor> start_reduce_scatter(const Group& group, const at::Tensor& x,
                                         std::vector<std::int64_t> rows) {
  const auto own = static_cast<std::size_t>(group.rank());
  const int tag = group.next_tag();
  Works works;
  std::vector<at::Tensor> parts(rows.size());  // of my rows, by rank
  naming(group, "reduce_scatter", [&] {
    std::int64_t begin = 0;
    for (int peer = 0; peer < group.size(); ++peer) {
      const auto p = static_cast<std::size_t>(peer);
      const at::Tensor theirs = x.narrow(0, begin, rows[p]);
      begin += rows[p];
      if (peer == group.rank()) {
        parts[p] = theirs;
        continue;
      }
      parts[p] = at::empty(with_rows(x, rows[own]), x.options());
      if (theirs.numel() > 0) send(group, works, theirs, peer, tag);
      if (parts[p].numel() > 0) receive(group, works, parts[p], peer, tag);
    }
  });
  return Pending<at::Tensor>([&group, x, parts, works] {
    wait_all(group, "reduce_scatter", works);
    const trace::Span span(trace::Kind::copy, "reduce");
    at::Tensor sum = parts[0].to(sum_dtype(x.scalar_type()), /*non_blocking=*/false, /*copy=*/true);
    for (std::size_t p = 1; p < parts.size(); ++p) sum.add_(parts[p]);
    return sum.to(x.scalar_type());
  });
}

Pending<at::Tensor> start_all_reduce(const Group& group, const at::Tensor& x, ReduceOp op,
                                     at::Tensor out) {
  at::Tensor sum = x.to(sum_dtype(x.scalar_type()), /*non_blocking=*/false, /*copy=*/true);
  c10d::AllreduceOptions options;
  options.reduceOp = op == ReduceOp::max ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
  std::vector<at::Tensor> message{sum};
  Works works{
      naming(group, "all_reduce", [&] { return group.backend().allreduce(message, options); })};
  return Pending<at::Tensor>([&group, x, out, sum, works]() mutable {
    wait_all(group, "all_reduce", works);
    if (!out.defined()) return sum.to(x.scalar_type());
    out.copy_(sum);
    return out;
  });
}

Pending<at::Tensor> start_all_to_all(const Group& group, const at::Tensor& x,
                                     std::vector<std::int64_t> send_rows,
                                     std::vector<std::int64_t> recv_rows) {
  at::Tensor out =
      at::empty(with_rows(x, std::reduce(recv_rows.begin(), recv_rows.end())), x.options());
  const int tag = group.next_tag();
  Works works;
  naming(group, "all_to_all", [&] {
    std::int64_t from = 0, to = 0;
    for (int peer = 0; peer < group.size(); ++peer) {
      const auto p = static_cast<std::size_t>(peer);
      const at::Tensor theirs = x.narrow(0, from, send_rows[p]);
      const at::Tensor mine = out.narrow(0, to, recv_rows[p]);
      from += send_rows[p];
      to += recv_rows[p];
      if (peer == group.rank()) {
        mine.copy_(theirs);
        continue;
      }
      if (theirs.numel() > 0) send(group, works, theirs, peer, tag);
      if (mine.numel() > 0) receive(group, works, mine, peer, tag);
    }
  });
  return Pending<at::Tensor>([&group, x, out, works] {
    wait_all(group, "all_to_all", works);
    return out;
  });
}

at::Tensor broadcast(const Group& group, const at::Tensor& x, int root) {
  at::Tensor out = x.clone();
  std::vector<at::Tensor> message{out};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  wait_all(
      group, "broadcast",
      {naming(group, "broadcast", [&] { return group.backend().broadcast(message, options); })});
  return out;
}

void barrier(const Group& group) {
  wait_all(group, "barrier", {naming(group, "barrier", [&] { return group.backend().barrier(); })});
}

}  // namespace braid::network
