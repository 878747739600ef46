// Makes groups.
#include "braid/comm/group.h"

#include <fmt/format.h>

#include <atomic>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "braid/comm/gloo_group.h"
#include "braid/comm/shared_memory.h"
#include "braid/core/check.h"

namespace braid {
namespace {

/// Errors: ValueError when a rank of the group takes it to be of another size.
void check_sizes(c10d::Store& store, const std::string& name, int rank, int size) {
  const auto key = [](int of) { return fmt::format("size/{}", of); };
  int peer = rank;
  std::string theirs = std::to_string(size);
  const std::string mine = theirs;
  try {
    store.set(key(rank), mine);
    for (peer = 0; peer < size && theirs == mine; ++peer) theirs = store.get_to_str(key(peer));
  } catch (const std::exception& error) {
    const auto* known = dynamic_cast<const c10::Error*>(&error);
    C10_THROW_ERROR(
        DistBackendError,
        fmt::format("group {} rank {}: rank {} did not come to make the group: {}", name, rank,
                    peer, known != nullptr ? known->what_without_backtrace() : error.what()));
  }
  BRAID_CHECK(theirs == mine, "group ", name, ": ranks ", rank, " and ", peer - 1,
              " disagree in its size: ", mine, " and ", theirs);
}

}  // namespace

std::shared_ptr<Group> Group::create(const c10::intrusive_ptr<c10d::Store>& store,
                                     const std::string& name, int rank, int size,
                                     GroupOptions options) {
  BRAID_CHECK(size >= 1 && rank >= 0 && rank < size, "group ", name, ": rank ", rank,
              " is not below size ", size);
  auto group = std::shared_ptr<Group>(new Group);
  group->rank_ = rank;
  group->size_ = size;
  group->name_ = name;
  group->options_ = options;
  if (size == 1 && store == nullptr) return group;
  group->store_ = c10::make_intrusive<c10d::PrefixStore>(name, store);
  group->store_->setTimeout(options.timeout);
  check_sizes(*group->store_, name, rank, size);
  if (size == 1) return group;
  if (options.shared_memory)
    group->memory_ = SharedMemory::create(group->store_, name, rank, size, options.timeout);
  return group;
}

std::shared_ptr<Group> Group::create_stub(const std::string& name, int rank, int size) {
  auto group = std::shared_ptr<Group>(new Group);
  group->rank_ = rank;
  group->size_ = size;
  group->name_ = name;
  if (size > 1) group->memory_ = SharedMemory::create_stub(name, rank, size);
  return group;
}

Group::Group() {
  static std::atomic<std::uint64_t> num_made{0};
  id_ = ++num_made;
}

Group::~Group() = default;

void Group::fail(const std::string& lost, std::string why) const {
  check_usable();
  const std::string mine = fmt::format("rank {} lost {}", rank_, lost);
  try {
    const std::string first = store_->compareSet("lost", std::string(), mine);
    if (first != mine) why += fmt::format(" ({} before)", first);
  } catch (const std::exception&) {  // the store went with the peer
  }
  lost_ = why;
  C10_THROW_ERROR(DistBackendError, why);
}

void Group::check_usable() const {
  TORCH_CHECK_WITH(DistBackendError, lost_.empty(), "group ", name_, " is unusable since: ", lost_);
}

c10d::Backend& Group::backend() const {
  TORCH_INTERNAL_ASSERT(size_ > 1, "a group of one has no messages to send");
  check_usable();
  if (!backend_) backend_ = make_gloo_group(store_, rank_, size_, options_.timeout);
  return *backend_;
}

}  // namespace braid
