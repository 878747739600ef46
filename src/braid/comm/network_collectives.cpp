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

/// The messages of one operation. What the process group throws becomes a DistBackendError that
/// names the operation and, where it is known, the peer.
class Messages {
 public:
  Messages(const Group& group, const char* op) : group_(group), op_(op) {}

  void send(const at::Tensor& x, int peer, int tag) {
    if (x.numel() == 0) return;
    add(
        peer,
        [&](c10d::Backend& backend, auto& tensors) { return backend.send(tensors, peer, tag); }, x);
  }
  void receive(const at::Tensor& x, int peer, int tag) {
    if (x.numel() == 0) return;
    add(
        peer,
        [&](c10d::Backend& backend, auto& tensors) { return backend.recv(tensors, peer, tag); }, x);
  }
  /// `start(backend, tensors)` starts a collective of the process group on x.
  template <class Start>
  void collective(Start&& start, const at::Tensor& x) {
    add(kAll, std::forward<Start>(start), x);
  }

  const char* op() const { return op_; }

  void wait() const {
    const trace::Operation operation(op_, trace::resumed);
    const trace::Span span(trace::Kind::wait, "wait");
    for (const Message& message : messages_)
      naming(message.peer, [&] { message.work->wait(group_.timeout()); });
  }

 private:
  static constexpr int kAll = -1;
  struct Message {
    c10::intrusive_ptr<c10d::Work> work;
    int peer;
  };

  template <class Start>
  void add(int peer, Start&& start, const at::Tensor& x) {
    std::vector<at::Tensor> tensors{x};
    naming(peer, [&] { messages_.push_back({start(group_.backend(), tensors), peer}); });
  }

  template <class F>
  void naming(int peer, F&& f) const {
    const auto since = std::chrono::steady_clock::now();
    try {
      f();
    } catch (const c10::ValueError&) {
      throw;
    } catch (const std::exception& error) {
      const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - since;
      const auto* known = dynamic_cast<const c10::Error*>(&error);
      const std::string lost = peer == kAll ? "a peer" : fmt::format("rank {}", peer);
      group_.fail(
          lost,
          fmt::format("{}: group {} rank {}: lost {}: {:.3f} s elapsed of at most {:.3f} s: {}",
                      op_, group_.name(), group_.rank(), lost, elapsed.count(),
                      std::chrono::duration<double>(group_.timeout()).count(),
                      known != nullptr ? known->what_without_backtrace() : error.what()));
    }
  }

  const Group& group_;
  const char* op_;
  std::vector<Message> messages_;
};

}  // namespace

Pending<at::Tensor> start_all_gather(const Group& group, const at::Tensor& x_shard,
                                     std::vector<std::int64_t> rows) {
  if (rows.empty()) rows = all_gather_rows(group, x_shard);
  const int tag = group.next_tag();
  at::Tensor out =
      at::empty(with_rows(x_shard, std::reduce(rows.begin(), rows.end())), x_shard.options());
  Messages messages(group, "all_gather");
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
    messages.send(x_shard, peer, tag);
    messages.receive(part, peer, tag);
  }
  return Pending<at::Tensor>([x_shard, out, messages] {
    messages.wait();
    return out;
  });
}

Pending<at::Tensor> start_reduce_scatter(const Group& group, const at::Tensor& x,
                                         std::vector<std::int64_t> rows) {
  const auto own = static_cast<std::size_t>(group.rank());
  const int tag = group.next_tag();
  Messages messages(group, "reduce_scatter");
  std::vector<at::Tensor> parts(rows.size());  // of my rows, by rank
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
    messages.send(theirs, peer, tag);
    messages.receive(parts[p], peer, tag);
  }
  return Pending<at::Tensor>([x, parts, messages] {
    const trace::Operation operation(messages.op(), trace::resumed);
    messages.wait();
    const trace::Span span(trace::Kind::copy, "reduce");
    at::Tensor sum = at::empty(parts[0].sizes(), x.options());
    sum_parts(sum, parts);
    return sum;
  });
}

Pending<at::Tensor> start_all_reduce(const Group& group, const at::Tensor& x, ReduceOp op,
                                     at::Tensor out) {
  at::Tensor sum = x.to(sum_dtype(x.scalar_type()), /*non_blocking=*/false, /*copy=*/true);
  c10d::AllreduceOptions options;
  options.reduceOp = op == ReduceOp::max ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
  Messages messages(group, "all_reduce");
  messages.collective(
      [&](c10d::Backend& backend, auto& tensors) { return backend.allreduce(tensors, options); },
      sum);
  return Pending<at::Tensor>([x, out, sum, messages]() mutable {
    messages.wait();
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
  Messages messages(group, "all_to_all");
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
    messages.send(theirs, peer, tag);
    messages.receive(mine, peer, tag);
  }
  return Pending<at::Tensor>([x, out, messages] {
    messages.wait();
    return out;
  });
}

at::Tensor broadcast(const Group& group, const at::Tensor& x, int root) {
  at::Tensor out = x.clone();
  c10d::BroadcastOptions options;
  options.rootRank = root;
  Messages messages(group, "broadcast");
  messages.collective(
      [&](c10d::Backend& backend, auto& tensors) { return backend.broadcast(tensors, options); },
      out);
  messages.wait();
  return out;
}

void barrier(const Group& group) {
  Messages messages(group, "barrier");
  messages.collective([](c10d::Backend& backend, auto&) { return backend.barrier(); },
                      at::Tensor());
  messages.wait();
}

}  // namespace braid::network
