// Waiting on a Flag.
#include "braid/comm/flag.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

namespace braid {
namespace {

/// Tells the core that this is a loop of polls.
void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void Flag::raise(std::uint64_t to) {
  std::uint64_t now = value.load(std::memory_order_relaxed);
  while (now < to && !value.compare_exchange_weak(now, to, std::memory_order_seq_cst)) continue;
  // seq_cst: ordered before the look at waiters
  if (waiters.load(std::memory_order_seq_cst) != 0)
    syscall(SYS_futex, &value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool Flag::spin(std::uint64_t at_least, int spins) const {
  for (int i = 0; i < spins; ++i) {
    if (reached(at_least)) return true;
    relax();
  }
  return reached(at_least);
}

bool Flag::sleep(std::uint64_t at_least, std::chrono::milliseconds slice) {
  waiters.fetch_add(1, std::memory_order_seq_cst);
  const std::uint64_t seen = value.load(std::memory_order_seq_cst);
  if (seen < at_least) {
    const timespec time{slice.count() / 1000, slice.count() % 1000 * 1'000'000};
    syscall(SYS_futex, &value, FUTEX_WAIT, static_cast<std::uint32_t>(seen), &time, nullptr, 0);
  }
  waiters.fetch_sub(1, std::memory_order_seq_cst);
  return reached(at_least);
}

}  // namespace braid
