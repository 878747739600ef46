// The all-to-all: rows for the ranks of this host lie in its memory, those for other hosts travel.
#include <numeric>
#include <optional>

#include "braid/comm/shared_memory.h"
#include "braid/comm/slot_tensor.h"
#include "braid/comm/transports.h"
#include "braid/comm/wire.h"
#include "braid/core/check.h"

namespace braid {
namespace {

constexpr const char* kOp = "all_to_all";

/// NOTE [slot of an all-to-all]. A table, which goes to other hosts, too: how many rows the rank sends to every rank
/// of the group, and how many it expects. Then the rows for the host's other ranks, in their order. Flag `result`:
/// 1, the tables of other hosts are there; 2, their rows.
class AllToAll {
 public:
  AllToAll(const Group& group, const at::Tensor& x, const std::vector<std::int64_t>& send_rows,
           const std::vector<std::int64_t>& recv_rows)
      : group_(group),
        here_(group.hosts().neighbours(group.rank())),
        x_(x.contiguous()),
        out_(at::empty(with_rows(x, std::reduce(recv_rows.begin(), recv_rows.end())), x.options())),
        lease_(group.memory()->start(header(), slot_bytes(send_rows))) {
    const auto rank = static_cast<std::size_t>(group.rank());
    for (int peer = 0; peer < group.size(); ++peer)
      tables_.push_back(at::empty({2, group.size()}, at::TensorOptions(at::kLong)));
    tables_[rank] = at::stack({at::tensor(send_rows), at::tensor(recv_rows)});
    store_to_slot(slot_table(group.rank()), tables_[rank]);
    for (const int peer : here_)
      if (peer != group.rank()) store_to_slot(place(group.rank(), peer), part(x_, 0, peer));
    lease_.publish(1);
    if (!group.on_one_host()) exchange();
    at::Tensor(part(out_, 1, group.rank())).copy_(part(x_, 0, group.rank()));
  }

  at::Tensor finish() {
    lease_.agree();
    for (const int peer : here_) {
      if (peer == group_.rank()) continue;
      lease_.wait_published(peer, 1);
      load_from_slot(tables_[static_cast<std::size_t>(peer)], slot_table(peer));
    }
    if (operation_) lease_.wait_result(group_.rank(), 1);
    if (!lease_.is_stub()) check();
    for (const int peer : here_) {
      if (peer == group_.rank()) continue;
      at::Tensor part_of_peer = part(out_, 1, peer);
      if (lease_.is_stub())
        part_of_peer.zero_();  // as many as are expected, whatever this rank sends
      else
        load_from_slot(part_of_peer, place(peer, group_.rank()));
    }
    if (operation_) {
      lease_.wait_result(group_.rank(), 2);
      operation_->finish();
      operation_.reset();
    }
    lease_.release();
    return out_;
  }

 private:
  Header header() const {
    Header header = tensor_header(kOp, x_.sizes(), x_.scalar_type());
    header.rows_agree = false;
    return header;
  }
  std::size_t table_bytes() const {
    return 2 * static_cast<std::size_t>(group_.size()) * sizeof(std::int64_t);
  }
  std::size_t bytes_of(std::int64_t rows) const {
    return static_cast<std::size_t>(rows * row_elements(x_)) * x_.element_size();
  }
  std::size_t slot_bytes(const std::vector<std::int64_t>& send_rows) const {
    std::int64_t rows = 0;
    for (const int peer : here_)
      if (peer != group_.rank()) rows += send_rows[static_cast<std::size_t>(peer)];
    return table_bytes() + bytes_of(rows);
  }
  at::Tensor slot_table(int rank) const {
    return slot_tensor(lease_, rank, 0, {2, group_.size()}, at::kLong);
  }
  /// A rank's row 0 or 1 of its table: what it sends, or expects.
  const std::int64_t* rows_of(int rank, int row) const {
    return tables_[static_cast<std::size_t>(rank)].const_data_ptr<std::int64_t>() +
           row * group_.size();
  }
  /// Of x or of the result: this rank's rows to or from a peer.
  at::Tensor part(const at::Tensor& of, int row, int peer) const {
    const std::int64_t* rows = rows_of(group_.rank(), row);
    return of.narrow(0, std::reduce(rows, rows + peer), rows[peer]);
  }
  /// Where rows from one rank of this host to another lie.
  at::Tensor place(int from, int to) const {
    std::int64_t before = 0;
    for (const int peer : here_) {
      if (peer == to) break;
      if (peer != from) before += rows_of(from, 0)[peer];
    }
    return slot_tensor(lease_, from, table_bytes() + bytes_of(before),
                       with_rows(x_, rows_of(from, 0)[to]), x_.scalar_type());
  }

  void exchange() {
    operation_.emplace(*group_.wire(), kOp, header());
    std::vector<int> away;  // each rank begins with the next one
    for (int step = 1; step < group_.size(); ++step)
      if (const int peer = (group_.rank() + step) % group_.size();
          !group_.hosts().together(peer, group_.rank()))
        away.push_back(peer);
    for (auto peer = away.rbegin(); peer != away.rend(); ++peer) {
      arriving_tables_.push_back(
          operation_->receive(Hop::first, tables_[static_cast<std::size_t>(*peer)], *peer));
      arriving_rows_.push_back(operation_->receive(Hop::second, part(out_, 1, *peer), *peer));
    }
    for (const int peer : away)
      operation_->send(Hop::first, tables_[static_cast<std::size_t>(group_.rank())], peer);
    for (const int peer : away) operation_->send(Hop::second, part(x_, 0, peer), peer);
    operation_->submit([this] {
      for (Message& message : arriving_tables_) message.wait();
      operation_->wait_sent(Hop::first);  // so that the peers compare this rank's, too
      lease_.publish_result(1);
    });
    operation_->submit([this] {
      for (Message& message : arriving_rows_) message.wait();
      lease_.publish_result(2);
    });
  }

  /// All ranks compare all tables, and so throw the same.
  void check() const {
    for (int from = 0; from < group_.size(); ++from) {
      for (int to = 0; to < group_.size(); ++to) {
        const std::int64_t sent = rows_of(from, 0)[to], expected = rows_of(to, 1)[from];
        if (sent == expected) continue;
        const std::string text =
            c10::str(kOp, ": rank ", from, " of group ", group_.name(), " sends ", sent,
                     " rows to rank ", to, ", which expects ", expected);
        if (operation_) group_.fail_disagreed(kOp, text);
        BRAID_CHECK(false, text);
      }
    }
  }

  const Group& group_;
  const std::vector<int>& here_;  // ranks of this host
  at::Tensor x_, out_;
  std::vector<at::Tensor> tables_;  // of every rank
  SharedMemory::Lease lease_;
  std::vector<Message> arriving_tables_, arriving_rows_;
  std::optional<Wire::Operation> operation_;  // between hosts
};

}  // namespace

Pending<at::Tensor> start_all_to_all_parts(const Group& group, const at::Tensor& x,
                                           std::vector<std::int64_t> send_rows,
                                           std::vector<std::int64_t> recv_rows) {
  return Pending<at::Tensor>(
      [started = std::make_shared<AllToAll>(group, x, send_rows, recv_rows)] {
        const trace::Operation operation(kOp, trace::resumed);
        return started->finish();
      });
}

}  // namespace braid
