// Reductions over the memory that the ranks of a host map.
#include <c10/util/hash.h>

#include "braid/comm/shared_memory.h"
#include "braid/comm/slot_tensor.h"
#include "braid/comm/transports.h"

namespace braid::shared {
namespace {

// All-reduces up to here are one-shot (every rank adds everything), larger ones two-shot (each adds
// a part and shares it).
constexpr std::size_t kOneShotBytes = 64 << 10;

/// An operation whose input lies in this rank's slot.
struct InSlot {
  InSlot(const Group& group, const Header& header, at::IntArrayRef sizes, at::ScalarType dtype)
      : lease(group.memory()->start(
            header,
            static_cast<std::size_t>(c10::multiply_integers(sizes)) * at::elementSize(dtype))),
        x(slot_tensor(lease, group.rank(), 0, sizes, dtype)) {
    tsan::write(x.data_ptr(), x.nbytes());
  }
  void publish() {
    tsan::write(x.data_ptr(), x.nbytes());
    lease.publish(1);
  }
  void wait_for_all(const Group& group) {
    lease.agree();
    for (int peer = 0; peer < group.size(); ++peer) lease.wait_published(peer, 1);
  }

  SharedMemory::Lease lease;
  at::Tensor x;
};

/// out = the reduction over all ranks of the elements from `first` on in their slots, in rank order.
///   out   flat; may be those elements of this rank's own slot
void reduce_slots(const SharedMemory::Lease& lease, int size, std::int64_t first, ReduceOp op,
                  at::Tensor out) {
  const trace::Span span(trace::Kind::copy, "reduce");
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < size; ++rank)
    parts.push_back(slot_tensor(lease, rank, static_cast<std::size_t>(first) * out.element_size(),
                                out.sizes(), out.scalar_type()));
  const SlotReads reads(parts);
  if (op == ReduceOp::sum) return sum_parts(out, parts);
  at::Tensor largest = parts[0];
  for (std::size_t rank = 1; rank < parts.size(); ++rank)
    largest = at::maximum(largest, parts[rank]);
  out.copy_(largest);
}

at::Tensor reduce_scattered(const Group& group, InSlot& in, const std::vector<std::int64_t>& rows) {
  in.wait_for_all(group);
  const auto own = static_cast<std::size_t>(group.rank());
  at::Tensor out = at::empty(with_rows(in.x, rows[own]), in.x.options());
  reduce_slots(in.lease, group.size(), first_row(rows, group.rank()) * row_elements(in.x),
               ReduceOp::sum, out.view(-1));
  in.lease.release();
  return out;
}

/// Every rank reduces its part in its own slot, where nobody else reads it, and then fetches the others'.
at::Tensor two_shot(const Group& group, InSlot& in, ReduceOp op, const at::Tensor& out) {
  SharedMemory::Lease& lease = in.lease;
  const auto parts = split_rows(in.x.numel(), group.size());
  const auto part = [&](const at::Tensor& of, int rank) {
    return of.view(-1).narrow(0, first_row(parts, rank), parts[static_cast<std::size_t>(rank)]);
  };
  const at::Tensor mine = part(in.x, group.rank());
  tsan::write(mine.data_ptr(), mine.nbytes());
  reduce_slots(lease, group.size(), first_row(parts, group.rank()), op, mine);
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
    const at::Tensor theirs = part(result, peer);
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
  in.wait_for_all(group);
  at::Tensor result;
  if (in.x.nbytes() > kOneShotBytes) {
    result = two_shot(group, in, op, out);
  } else {
    result = out.defined() && out.is_contiguous()
                 ? out
                 : at::empty(in.x.sizes(), at::TensorOptions(in.x.scalar_type()));
    reduce_slots(in.lease, group.size(), 0, op, result.view(-1));
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

}  // namespace

Prepared prepare_reduce_scatter(const Group& group, at::IntArrayRef sizes, at::ScalarType dtype,
                                std::vector<std::int64_t> rows) {
  constexpr const char* kOp = "reduce_scatter";
  Header header = tensor_header(kOp, sizes, dtype);
  header.set_variant("split of rows (hash)", static_cast<std::int64_t>(c10::get_hash(rows)));
  return prepared(
      std::make_shared<InSlot>(group, header, sizes, dtype), kOp,
      [&group, rows = std::move(rows)](InSlot& in) { return reduce_scattered(group, in, rows); });
}

Prepared prepare_all_reduce(const Group& group, at::IntArrayRef sizes, at::ScalarType dtype,
                            ReduceOp op, at::Tensor out) {
  constexpr const char* kOp = "all_reduce";
  Header header = tensor_header(kOp, sizes, dtype);
  header.set_variant("reduction", static_cast<std::int64_t>(op));
  return prepared(
      std::make_shared<InSlot>(group, header, sizes, dtype), kOp,
      [&group, op, out = std::move(out)](InSlot& in) { return all_reduced(group, in, op, out); });
}

}  // namespace braid::shared
