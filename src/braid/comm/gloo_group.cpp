// The only file that sees Gloo's headers: the wheel has none, Debian's are older, so no Gloo type
// is made or called here.
#include "braid/comm/gloo_group.h"

#include <sched.h>

#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "braid/comm/join.h"
#include "braid/comm/pipe_signal.h"

namespace braid {
namespace {

/// NOTE [batch]. Gloo's thread skips a connection that another thread holds, and is called again at once: on a
/// core that it shares with that thread, which it interrupted in the middle of a send, it turns in vain until the
/// scheduler takes the core from it. Threads of SCHED_BATCH interrupt nobody; they run in their turn, or where a
/// core is idle.
///
/// While it lives, threads that are started are of that class.
class StartsBatchThreads {
 public:
  StartsBatchThreads() : before_(::sched_getscheduler(0)) { set(SCHED_BATCH); }
  ~StartsBatchThreads() { set(before_); }
  StartsBatchThreads(const StartsBatchThreads&) = delete;
  StartsBatchThreads& operator=(const StartsBatchThreads&) = delete;

 private:
  /// Classes other than these are their users' choice.
  void set(int policy) const {
    if (before_ != SCHED_OTHER) return;
    const sched_param none{};
    (void)::sched_setscheduler(0, policy, &none);
  }
  const int before_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                  int rank, int size,
                                                  std::chrono::milliseconds timeout, bool in_turn) {
  using c10d::ProcessGroupGloo;
  const NoPipeSignal no_signal;
  std::optional<StartsBatchThreads> batch;
  if (in_turn) batch.emplace();
  auto options = ProcessGroupGloo::Options::create(timeout);
  options->devices = {ProcessGroupGloo::createDeviceForHostname(
      listening_address(place_from_environment(), store))};
  options->threads = 2;
  return c10::make_intrusive<ProcessGroupGloo>(store, rank, size, options);
}

}  // namespace braid
