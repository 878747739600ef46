// The host's memory, and how a long-running program of large tensors uses malloc.
#pragma once

#include <malloc.h>
#include <unistd.h>

#include <cstdlib>

namespace braid {

/// Keeps freed memory in the process and in huge pages. By default glibc gives every large tensor
/// back to the kernel, and the next one pays a page fault for each 4 KiB again (measured: 15 % of a
/// collective matmul; docs/design.md). To be called first in main(), as the environment of c10's
/// allocator is read once.
inline void keep_memory() {
  ::mallopt(M_MMAP_MAX, 0);
  ::mallopt(M_TRIM_THRESHOLD, -1);
  ::mallopt(M_TOP_PAD, 64 << 20);
  ::setenv("THP_MEM_ALLOC_ENABLE", "1", /*overwrite=*/0);
}

/// Bytes of the host's memory, in use or not.
inline double host_memory_bytes() {
  return static_cast<double>(::sysconf(_SC_PHYS_PAGES)) *
         static_cast<double>(::sysconf(_SC_PAGESIZE));
}

}  // namespace braid
