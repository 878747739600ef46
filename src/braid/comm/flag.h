// A growing number in shared memory that one rank writes and others wait for: spin briefly, then futex(2).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace braid {

/// One cache line.
/// | word    | state                       | who writes      | who reads  | at rest                      |
/// | value   | progress, never falls       | the owning rank | every rank | what the last operation left |
/// | waiters | ranks asleep or about to be | every waiter    | the owner  | 0; more if one was killed    |
/// The futex is on the low half of `value` (little-endian), without the private flag: waiters are in
/// other processes. The owner stores the value and then looks at `waiters`, a waiter counts itself
/// and then looks at the value, all sequentially consistent: one of the two sees the other. A wake
/// missed because that half wrapped around costs one slice of sleep.
struct alignas(64) Flag {
  std::atomic<std::uint64_t> value{0};
  std::atomic<std::uint32_t> waiters{0};

  /// Raises the value, unless another thread of the owner has raised it further (release: all that the owner
  /// wrote before is visible to who sees it), and wakes the sleepers.
  void raise(std::uint64_t to);

  bool reached(std::uint64_t at_least) const {
    return value.load(std::memory_order_acquire) >= at_least;
  }
  /// Polls up to `spins` times. Returns reached(at_least).
  bool spin(std::uint64_t at_least, int spins) const;
  /// Sleeps until raised, at most `slice`. Returns reached(at_least).
  bool sleep(std::uint64_t at_least, std::chrono::milliseconds slice);
};
static_assert(sizeof(Flag) == 64 && std::atomic<std::uint64_t>::is_always_lock_free);

}  // namespace braid
