// Reductions over the memory that the ranks of a host map.
#include <c10/util/hash.h>

#include <optional>

#include "braid/comm/shared_memory.h"
#include "braid/comm/slot_tensor.h"
#include "braid/comm/transports.h"

namespace braid::shared {
namespace {

// All-reduces up to here are one-shot (every rank adds everything), larger ones two-shot (each adds
// a part and shares it).
constexpr std::size_t kOneShotBytes = 64 << 10;

at::Tensor part_of(const at::Tensor& x, const std::vector<std::int64_t>& parts, int rank) {
  return x.view(-1).narrow(0, first_row(parts, rank), parts[static_cast<std::size_t>(rank)]);
}

/// An operation whose input lies in this rank's slot, as far as its peers read it.
struct InSlot {
  InSlot(const Group& the_group, const Header& header, at::IntArrayRef sizes, at::ScalarType dtype)
      : group(the_group),
        lease(group.memory()->start(
            header,
            static_cast<std::size_t>(c10::multiply_integers(sizes)) * at::elementSize(dtype))),
        x(slot_tensor(lease, group.rank(), 0, sizes, dtype)),
        own(lease.slot(group.rank())) {
    tsan::write(x.data_ptr(), x.nbytes());
  }
  /// Takes a caller's tensor, which stays unwritten until all is done: copies what the peers read.
  ///   parts  elements of the part that each rank reads of all; empty: they read everything
  void take(const at::Tensor& source, const std::vector<std::int64_t>& parts) {
    const at::AutoDispatchBelowADInplaceOrView faster;  // only the slot is written
    const trace::Span span(trace::Kind::copy, "publish");
    if (parts.empty() || !source.is_contiguous()) {
      x.copy_(source);
      return;
    }
    source_ = source;
    own = static_cast<std::byte*>(source.data_ptr());
    for (int peer = 0; peer < group.size(); ++peer)
      if (peer != group.rank()) part_of(x, parts, peer).copy_(part_of(source, parts, peer));
  }
  void publish() {
    tsan::write(x.data_ptr(), x.nbytes());
    lease.publish(1);
  }
  void wait_for_all() {
    lease.agree();
    for (int peer = 0; peer < group.size(); ++peer) lease.wait_published(peer, 1);
  }

  const Group& group;
  SharedMemory::Lease lease;
  at::Tensor x;    // the slot
  std::byte* own;  // where this rank reads its own values: the slot, or the caller's tensor

 private:
  at::Tensor source_;
};

/// out = the reduction over all ranks of the elements from `first` on of their inputs, in rank order.
///   out   flat; may be those elements of this rank's own slot
void reduce_inputs(const InSlot& in, std::int64_t first, ReduceOp op, at::Tensor out) {
  const trace::Span span(trace::Kind::copy, "reduce");
  const std::size_t offset = static_cast<std::size_t>(first) * out.element_size();
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < in.group.size(); ++rank)
    parts.push_back(at::from_blob((rank == in.group.rank() ? in.own : in.lease.slot(rank)) + offset,
                                  out.sizes(), out.options()));
  const SlotReads reads(parts);
  if (op == ReduceOp::sum) return sum_parts(out, parts);
  at::Tensor largest = parts[0];
  for (std::size_t rank = 1; rank < parts.size(); ++rank)
    largest = at::maximum(largest, parts[rank]);
  out.copy_(largest);
}

at::Tensor reduce_scattered(const Group& group, InSlot& in, const std::vector<std::int64_t>& rows) {
  in.wait_for_all();
  const auto own = static_cast<std::size_t>(group.rank());
  at::Tensor out = at::empty(with_rows(in.x, rows[own]), in.x.options());
  reduce_inputs(in, first_row(rows, group.rank()) * row_elements(in.x), ReduceOp::sum,
                out.view(-1));
  in.lease.release();
  return out;
}

/// Every rank reduces its part in its own slot, where nobody else reads it, and then fetches the others'.
at::Tensor two_shot(const Group& group, InSlot& in, ReduceOp op, const at::Tensor& out) {
  SharedMemory::Lease& lease = in.lease;
  const auto parts = split_rows(in.x.numel(), group.size());
  const at::Tensor mine = part_of(in.x, parts, group.rank());
  tsan::write(mine.data_ptr(), mine.nbytes());
  reduce_inputs(in, first_row(parts, group.rank()), op, mine);
  tsan::write(mine.data_ptr(), mine.nbytes());
  lease.publish_result(1);
  at::Tensor result;
  if (!out.defined())
    result = kept_slot_tensor(lease, group.rank(), 0, in.x.sizes(), in.x.scalar_type());
  const bool kept = result.defined();  // then the own part lies in it already
  if (!kept)
    result = out.defined() && out.is_contiguous()
                 ? out
                 : at::empty(in.x.sizes(), at::TensorOptions(in.x.scalar_type()));
  for (int step = 0; step < group.size(); ++step) {
    const int peer = (group.rank() + step) % group.size();
    if (kept && peer == group.rank()) continue;
    lease.wait_result(peer, 1);
    const at::Tensor theirs = part_of(result, parts, peer);
    load_from_slot(
        theirs, slot_tensor(lease, peer,
                            static_cast<std::size_t>(first_row(parts, peer)) * in.x.element_size(),
                            theirs.sizes(), in.x.scalar_type()));
  }
  if (kept)
    lease.release_and_wait();  // peers read the own part in what the caller may write to now
  else
    lease.release();
  return result;
}

at::Tensor all_reduced(const Group& group, InSlot& in, ReduceOp op, at::Tensor out) {
  in.wait_for_all();
  std::optional<at::AutoDispatchBelowADInplaceOrView> faster;
  if (!out.defined())
    faster.emplace();  // autograd is to see what is written into a caller's tensor
  at::Tensor result;
  if (in.x.nbytes() > kOneShotBytes) {
    result = two_shot(group, in, op, out);
  } else {
    result = out.defined() && out.is_contiguous()
                 ? out
                 : at::empty(in.x.sizes(), at::TensorOptions(in.x.scalar_type()));
    reduce_inputs(in, 0, op, result.view(-1));
    in.lease.release();
  }
  if (!out.defined() || result.is_same(out)) return result;
  return out.copy_(result);
}

/// What is done in wait(), once the caller has written x.
template <class F>
Prepared prepared(std::shared_ptr<InSlot> in, const char* op, F finish) {
  const at::Tensor x = in->x;
  return {x, [in = std::move(in), op, finish = std::move(finish)] {
            in->publish();
            return Pending<at::Tensor>([in, op, finish] {
              const trace::Operation operation(op, trace::resumed);
              return finish(*in);
            });
          }};
}

constexpr const char* kReduceScatter = "reduce_scatter";
constexpr const char* kAllReduce = "all_reduce";

std::shared_ptr<InSlot> start_reduce_scatter(const Group& group, at::IntArrayRef sizes,
                                             at::ScalarType dtype,
                                             const std::vector<std::int64_t>& rows) {
  Header header = tensor_header(kReduceScatter, sizes, dtype);
  header.set_variant("split of rows (hash)", static_cast<std::int64_t>(c10::get_hash(rows)));
  return std::make_shared<InSlot>(group, header, sizes, dtype);
}
Prepared prepared_reduce_scatter(std::shared_ptr<InSlot> in, std::vector<std::int64_t> rows) {
  return prepared(std::move(in), kReduceScatter, [rows = std::move(rows)](InSlot& started) {
    return reduce_scattered(started.group, started, rows);
  });
}

std::shared_ptr<InSlot> start_all_reduce(const Group& group, at::IntArrayRef sizes,
                                         at::ScalarType dtype, ReduceOp op) {
  Header header = tensor_header(kAllReduce, sizes, dtype);
  header.set_variant("reduction", static_cast<std::int64_t>(op));
  return std::make_shared<InSlot>(group, header, sizes, dtype);
}
Prepared prepared_all_reduce(std::shared_ptr<InSlot> in, ReduceOp op, at::Tensor out) {
  return prepared(std::move(in), kAllReduce, [op, out = std::move(out)](InSlot& started) {
    return all_reduced(started.group, started, op, out);
  });
}

}  // namespace

Prepared prepare_reduce_scatter(const Group& group, at::IntArrayRef sizes, at::ScalarType dtype,
                                std::vector<std::int64_t> rows) {
  return prepared_reduce_scatter(start_reduce_scatter(group, sizes, dtype, rows), std::move(rows));
}

Pending<at::Tensor> start_reduce_scatter(const Group& group, const at::Tensor& x,
                                         std::vector<std::int64_t> rows) {
  auto in = start_reduce_scatter(group, x.sizes(), x.scalar_type(), rows);
  std::vector<std::int64_t> parts = rows;
  for (auto& part : parts) part *= row_elements(x);
  in->take(x, parts);
  return prepared_reduce_scatter(std::move(in), std::move(rows)).start();
}

Prepared prepare_all_reduce(const Group& group, at::IntArrayRef sizes, at::ScalarType dtype,
                            ReduceOp op, at::Tensor out) {
  return prepared_all_reduce(start_all_reduce(group, sizes, dtype, op), op, std::move(out));
}

Pending<at::Tensor> start_all_reduce(const Group& group, const at::Tensor& x, ReduceOp op,
                                     at::Tensor out) {
  auto in = start_all_reduce(group, x.sizes(), x.scalar_type(), op);
  const bool is_two_shot = x.nbytes() > kOneShotBytes;
  in->take(x, is_two_shot ? split_rows(x.numel(), group.size()) : std::vector<std::int64_t>());
  return prepared_all_reduce(std::move(in), op, std::move(out)).start();
}

}  // namespace braid::shared
