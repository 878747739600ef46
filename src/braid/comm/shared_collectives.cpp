// Collectives over the memory that the ranks of a host map.
#include <cstring>

#include "braid/comm/shared_memory.h"
#include "braid/comm/slot_tensor.h"
#include "braid/comm/transports.h"

namespace braid::shared {
namespace {

Header make_header(const char* op, const at::Tensor& x) {
  return tensor_header(op, x.sizes(), x.scalar_type());
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

const braid::Transport braid::kShared{shared::start_all_gather, shared::start_reduce_scatter,
                                      shared::start_all_reduce, start_all_to_all_parts,
                                      shared::broadcast,        shared::barrier};
