// Collectives over the memory that the ranks of a host map.
#include <c10/util/hash.h>

#include <cstring>
#include <numeric>

#include "braid/comm/shared_memory.h"
#include "braid/comm/slot_tensor.h"
#include "braid/comm/transports.h"
#include "braid/core/check.h"

namespace braid::shared {
namespace {

// All-reduces up to here are one-shot (every rank adds everything), larger ones two-shot (each adds
// a part and shares it).
constexpr std::size_t kOneShotBytes = 256 << 10;

std::int64_t num_rows(const at::Tensor& x) { return x.dim() == 0 ? 1 : x.size(0); }

Header make_header(const char* op, const at::Tensor& x) {
  Header header;
  std::strncpy(header.op, op, sizeof header.op - 1);
  header.dtype = static_cast<std::int64_t>(x.scalar_type());
  header.n = row_elements(x);
  header.rows = num_rows(x);
  return header;
}

/// out = the reduction over all ranks of the tensor at `offset` in their slots, in rank order, rounded once.
void reduce_slots(const SharedMemory::Lease& lease, int size, std::size_t offset, ReduceOp op,
                  at::Tensor out) {
  const trace::Span span(trace::Kind::copy, "reduce");
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < size; ++rank)
    parts.push_back(slot_tensor(lease, rank, offset, out.sizes(), out.scalar_type()));
  const SlotReads reads(parts);
  const at::ScalarType dtype = sum_dtype(out.scalar_type());
  if (op == ReduceOp::max) {
    at::maximum_out(out, parts[0], parts[1]);
    for (std::size_t rank = 2; rank < parts.size(); ++rank) at::maximum_out(out, out, parts[rank]);
  } else if (dtype == out.scalar_type()) {
    at::add_out(out, parts[0], parts[1]);
    for (std::size_t rank = 2; rank < parts.size(); ++rank) out.add_(parts[rank]);
  } else {
    at::Tensor sum = parts[0].to(dtype);
    for (std::size_t rank = 1; rank < parts.size(); ++rank) sum.add_(parts[rank]);
    out.copy_(sum);
  }
}

/// Shares ownership of a lease with a std::function, which wants copies.
std::shared_ptr<SharedMemory::Lease> start(const Group& group, const Header& header,
                                           std::size_t bytes) {
  return std::make_shared<SharedMemory::Lease>(group.memory()->start(header, bytes));
}

}  // namespace

Pending<at::Tensor> start_all_gather(const Group& group, const at::Tensor& x_shard,
                                     std::vector<std::int64_t> rows) {
  Header header = make_header("all_gather", x_shard);
  header.set_rows_of_ranks(rows);
  auto lease = start(group, header, x_shard.nbytes());
  store_to_slot(slot_tensor(*lease, group.rank(), 0, x_shard.sizes(), x_shard.scalar_type()),
                x_shard);
  lease->publish(1);
  return Pending<at::Tensor>([&group, x_shard, lease] {
    const trace::Operation operation("all_gather", trace::resumed);
    lease->agree();
    std::int64_t total = 0;
    for (int peer = 0; peer < group.size(); ++peer) total += lease->header(peer).rows;
    at::Tensor out = at::empty(with_rows(x_shard, total), x_shard.options());
    std::int64_t begin = 0;
    for (int peer = 0; peer < group.size(); ++peer) {
      const std::int64_t n = lease->header(peer).rows;
      at::Tensor part = out.narrow(0, begin, n);
      begin += n;
      if (peer == group.rank()) {
        const trace::Span span(trace::Kind::copy, "fetch");
        part.copy_(x_shard);
        continue;
      }
      lease->wait_published(peer, 1);
      load_from_slot(part, slot_tensor(*lease, peer, 0, part.sizes(), part.scalar_type()));
    }
    lease->release();
    return out;
  });
}

Pending<at::Tensor> start_reduce_scatter(const Group& group, const at::Tensor& x,
                                         std::vector<std::int64_t> rows) {
  Header header = make_header("reduce_scatter", x);
  header.set_variant("split of rows (hash)", static_cast<std::int64_t>(c10::get_hash(rows)));
  auto lease = start(group, header, x.nbytes());
  store_to_slot(slot_tensor(*lease, group.rank(), 0, x.sizes(), x.scalar_type()), x);
  lease->publish(1);
  return Pending<at::Tensor>([&group, x, rows, lease] {
    const trace::Operation operation("reduce_scatter", trace::resumed);
    lease->agree();
    const auto rank = static_cast<std::size_t>(group.rank());
    const std::int64_t begin = first_row(rows, group.rank());
    at::Tensor out = at::empty(with_rows(x, rows[rank]), x.options());
    for (int peer = 0; peer < group.size(); ++peer) lease->wait_published(peer, 1);
    const auto offset = static_cast<std::size_t>(begin * row_elements(x)) * x.element_size();
    reduce_slots(*lease, group.size(), offset, ReduceOp::sum, out);
    lease->release();
    return out;
  });
}

Pending<at::Tensor> start_all_reduce(const Group& group, const at::Tensor& x, ReduceOp op,
                                     at::Tensor out) {
  Header header = make_header("all_reduce", x);
  header.set_variant("reduction", static_cast<std::int64_t>(op));
  const bool one_shot = x.nbytes() <= kOneShotBytes;
  auto lease = start(group, header, x.nbytes());
  store_to_slot(slot_tensor(*lease, group.rank(), 0, x.sizes(), x.scalar_type()), x);
  lease->publish(1);
  return Pending<at::Tensor>([&group, x, op, out, one_shot, lease] {
    const trace::Operation operation("all_reduce", trace::resumed);
    lease->agree();
    const bool direct = out.defined() && out.is_contiguous();
    at::Tensor result = direct ? out : at::empty_like(x, at::MemoryFormat::Contiguous);
    for (int peer = 0; peer < group.size(); ++peer) lease->wait_published(peer, 1);
    if (one_shot) {
      reduce_slots(*lease, group.size(), 0, op, result);
    } else {
      const at::Tensor flat = result.view(-1);
      const auto parts = split_rows(x.numel(), group.size());
      const auto part = [&](int rank) {
        return flat.narrow(0, first_row(parts, rank), parts[static_cast<std::size_t>(rank)]);
      };
      const auto bytes = [&](int rank) {
        return static_cast<std::size_t>(first_row(parts, rank)) * x.element_size();
      };
      const int own = group.rank();
      // Nobody else reads this part of this slot: the result takes its place.
      const at::Tensor mine = part(own);
      reduce_slots(*lease, group.size(), bytes(own), op, mine);
      store_to_slot(slot_tensor(*lease, group.rank(), bytes(own), mine.sizes(), x.scalar_type()),
                    mine);
      lease->publish_result(1);
      for (int peer = 0; peer < group.size(); ++peer) {
        if (peer == group.rank()) continue;
        lease->wait_result(peer, 1);
        const at::Tensor theirs = part(peer);
        load_from_slot(theirs,
                       slot_tensor(*lease, peer, bytes(peer), theirs.sizes(), x.scalar_type()));
      }
    }
    lease->release();
    if (!out.defined() || direct) return result;
    out.copy_(result);
    return out;
  });
}

Pending<at::Tensor> start_all_to_all(const Group& group, const at::Tensor& x,
                                     std::vector<std::int64_t> send_rows,
                                     std::vector<std::int64_t> recv_rows) {
  const auto size = static_cast<std::size_t>(group.size());
  // send_rows, recv_rows, then the payload
  const std::size_t row_bytes = size * sizeof(std::int64_t), table = 2 * row_bytes;
  Header header = make_header("all_to_all", x);
  header.rows_agree = false;
  auto lease = start(group, header, table + x.nbytes());
  std::memcpy(lease->slot(group.rank()), send_rows.data(), row_bytes);
  std::memcpy(lease->slot(group.rank()) + row_bytes, recv_rows.data(), row_bytes);
  store_to_slot(slot_tensor(*lease, group.rank(), table, x.sizes(), x.scalar_type()), x);
  lease->publish(1);
  return Pending<at::Tensor>([&group, x, recv_rows, row_bytes, table, size, lease] {
    const trace::Operation operation("all_to_all", trace::resumed);
    lease->agree();
    std::vector<std::vector<std::int64_t>> sent(size, std::vector<std::int64_t>(size));
    auto expected = sent;
    for (std::size_t peer = 0; peer < size; ++peer) {
      lease->wait_published(static_cast<int>(peer), 1);
      const std::byte* slot = lease->slot(static_cast<int>(peer));
      std::memcpy(sent[peer].data(), slot, row_bytes);
      std::memcpy(expected[peer].data(), slot + row_bytes, row_bytes);
    }
    for (std::size_t from = 0; from < size; ++from)
      for (std::size_t to = 0; to < size; ++to)
        BRAID_CHECK(sent[from][to] == expected[to][from], "all_to_all: rank ", from, " of group ",
                    group.name(), " sends ", sent[from][to], " rows to rank ", to,
                    ", which expects ", expected[to][from]);
    at::Tensor out =
        at::empty(with_rows(x, std::reduce(recv_rows.begin(), recv_rows.end())), x.options());
    std::int64_t begin = 0;
    for (std::size_t peer = 0; peer < size; ++peer) {
      const std::int64_t before = first_row(sent[peer], group.rank());
      const at::Tensor part = out.narrow(0, begin, recv_rows[peer]);
      begin += recv_rows[peer];
      load_from_slot(part, slot_tensor(*lease, static_cast<int>(peer),
                                       table + static_cast<std::size_t>(before * row_elements(x)) *
                                                   x.element_size(),
                                       part.sizes(), x.scalar_type()));
    }
    lease->release();
    return out;
  });
}

at::Tensor broadcast(const Group& group, const at::Tensor& x, int root) {
  Header header = make_header("broadcast", x);
  header.set_variant("root", root);
  auto lease = start(group, header, x.nbytes());
  if (group.rank() == root) {
    store_to_slot(slot_tensor(*lease, root, 0, x.sizes(), x.scalar_type()), x);
    lease->publish(1);
  }
  lease->agree();
  lease->wait_published(root, 1);
  at::Tensor out = at::empty(x.sizes(), x.options());
  load_from_slot(out, slot_tensor(*lease, root, 0, x.sizes(), x.scalar_type()));
  return out;
}

void barrier(const Group& group) {
  Header header;
  std::strncpy(header.op, "barrier", sizeof header.op - 1);
  start(group, header, 0)->agree();
}

}  // namespace braid::shared
