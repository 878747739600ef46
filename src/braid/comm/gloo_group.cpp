// The only file that sees Gloo's headers: the wheel has none, Debian's are older, so no Gloo type
// is made or called here.
#include "braid/comm/gloo_group.h"

#include <net/if.h>

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "braid/core/env.h"

namespace braid {

c10::intrusive_ptr<c10d::Backend> make_gloo_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                  int rank, int size,
                                                  std::chrono::milliseconds timeout) {
  using c10d::ProcessGroupGloo;
  const std::string& where = env().interface;
  auto options = ProcessGroupGloo::Options::create(timeout);
  if (where.empty())
    options->devices = {ProcessGroupGloo::createDeviceForHostname("127.0.0.1")};
  else if (if_nametoindex(where.c_str()) != 0)
    options->devices = {ProcessGroupGloo::createDeviceForInterface(where)};
  else
    options->devices = {ProcessGroupGloo::createDeviceForHostname(where)};
  options->threads = 2;
  return c10::make_intrusive<ProcessGroupGloo>(store, rank, size, options);
}

}  // namespace braid
