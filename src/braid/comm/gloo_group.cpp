// The only file that sees Gloo's headers: the wheel has none, Debian's are older, so no Gloo type
// is made or called here.
#include "braid/comm/gloo_group.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "braid/comm/join.h"
#include "braid/comm/pipe_signal.h"

namespace braid {

c10::intrusive_ptr<c10d::Backend> make_gloo_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                  int rank, int size,
                                                  std::chrono::milliseconds timeout) {
  using c10d::ProcessGroupGloo;
  const NoPipeSignal no_signal;
  auto options = ProcessGroupGloo::Options::create(timeout);
  options->devices = {ProcessGroupGloo::createDeviceForHostname(
      listening_address(place_from_environment(), store))};
  options->threads = 2;
  return c10::make_intrusive<ProcessGroupGloo>(store, rank, size, options);
}

}  // namespace braid
