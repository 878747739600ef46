// Tells ThreadSanitizer of payload that ATen's (uninstrumented) kernels read or write in shared memory.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_read_range(void* address, unsigned long size);   // NOLINT
extern "C" void __tsan_write_range(void* address, unsigned long size);  // NOLINT
namespace braid::tsan {
inline void read(const void* p, std::size_t bytes) {
  __tsan_read_range(const_cast<void*>(p), bytes);
}
inline void write(void* p, std::size_t bytes) { __tsan_write_range(p, bytes); }
}  // namespace braid::tsan
#else
namespace braid::tsan {
inline void read(const void*, std::size_t) {}
inline void write(void*, std::size_t) {}
}  // namespace braid::tsan
#endif
