// Slots of shared memory as tensors, and the copies that publish and fetch payload.
#pragma once

#include <ATen/ATen.h>

#include <cstring>
#include <vector>

#include "braid/comm/shared_memory.h"
#include "braid/core/trace.h"
#include "braid/core/tsan.h"

namespace braid {

/// The header of an operation on a tensor: dim 0 is its rows.
inline Header tensor_header(const char* op, at::IntArrayRef sizes, at::ScalarType dtype) {
  Header header;
  std::strncpy(header.op, op, sizeof header.op - 1);
  header.dtype = static_cast<std::int64_t>(dtype);
  header.n = sizes.empty() ? 1 : c10::multiply_integers(sizes.slice(1));
  header.rows = sizes.empty() ? 1 : sizes[0];
  return header;
}

/// A contiguous tensor at `offset` bytes of rank's slot. It is memory of the lease: never let it
/// out of the operation.
inline at::Tensor slot_tensor(const SharedMemory::Lease& lease, int rank, std::size_t offset,
                              at::IntArrayRef shape, at::ScalarType dtype) {
  return at::from_blob(lease.slot(rank) + offset, shape, at::TensorOptions(dtype));
}

/// The tensor at `offset` of this rank's slot, which it keeps while it lives; undefined when no more
/// slots can be kept.
inline at::Tensor kept_slot_tensor(SharedMemory::Lease& lease, int rank, std::size_t offset,
                                   at::IntArrayRef shape, at::ScalarType dtype) {
  auto guard = lease.keep_slot();
  if (guard == nullptr) return {};
  return at::from_blob(
      lease.slot(rank) + offset, shape, [guard](void*) {}, at::TensorOptions(dtype));
}

/// Tells ThreadSanitizer that tensors in slots are read from here to the end of the scope: at both
/// ends, so that neither a wait that comes too late nor a release that comes too early goes unseen.
class SlotReads {
#if defined(__SANITIZE_THREAD__)
 public:
  explicit SlotReads(at::TensorList slots) : slots_(slots.begin(), slots.end()) { tell(); }
  ~SlotReads() { tell(); }
  SlotReads(const SlotReads&) = delete;
  SlotReads& operator=(const SlotReads&) = delete;

 private:
  void tell() const {
    for (const at::Tensor& slot : slots_)
      if (slot.is_contiguous()) tsan::read(slot.data_ptr(), slot.nbytes());  // else: a bias
  }
  std::vector<at::Tensor> slots_;
#else
 public:
  explicit SlotReads(at::TensorList) {}
#endif
};

/// Copies x into the slot of this rank (write) or a slot's tensor out (read), converting where dtypes differ.
inline void store_to_slot(at::Tensor slot, const at::Tensor& x) {
  const trace::Span span(trace::Kind::copy, "publish");
  tsan::write(slot.data_ptr(), slot.nbytes());
  slot.copy_(x);
  tsan::write(slot.data_ptr(), slot.nbytes());
}
inline void load_from_slot(at::Tensor out, const at::Tensor& slot) {
  const trace::Span span(trace::Kind::copy, "fetch");
  const SlotReads reads(slot);
  out.copy_(slot);
}

}  // namespace braid
