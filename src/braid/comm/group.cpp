// Makes groups.
#include "braid/comm/group.h"

#include <fmt/format.h>

#include <atomic>
#include <future>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "braid/comm/gloo_group.h"
#include "braid/comm/shared_memory.h"
#include "braid/comm/wire.h"
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
    C10_THROW_ERROR(DistBackendError,
                    fmt::format("group {} rank {}: rank {} did not come to make the group: {}",
                                name, rank, peer, text_of(error)));
  }
  BRAID_CHECK(theirs == mine, "group ", name, ": ranks ", rank, " and ", peer - 1,
              " disagree in its size: ", mine, " and ", theirs);
}

/// In the store: whom this rank has lost.
std::string lost_key(int rank) { return fmt::format("lost/{}", rank); }
/// There when this rank knows all that it wants to know.
std::string asked_key(int rank) { return fmt::format("asked/{}", rank); }

void pause() { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }

/// Asks the store, on a thread that may be left behind: beyond a wire that is cut it never answers.
template <class F>
void in_a_second(F ask) {
  auto done = std::make_shared<std::promise<void>>();
  const auto is_done = done->get_future();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  std::thread([=]() mutable {
    try {
      ask([=] { return std::chrono::steady_clock::now() < deadline; });
    } catch (const std::exception&) {  // the store went with the peer
    }
    done->set_value();
  }).detach();
  (void)is_done.wait_until(deadline + std::chrono::milliseconds(20));
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
  group->hosts_ = Hosts::all_on_one(size);
  if (size == 1 && store == nullptr) return group;
  group->store_ = c10::make_intrusive<c10d::PrefixStore>(name, store);
  group->store_->setTimeout(options.timeout);
  check_sizes(*group->store_, name, rank, size);
  if (size == 1) return group;
  const auto& pretended = options.pretended_hosts;
  const int pretended_host = !options.shared_memory ? rank
                             : pretended.empty()    ? 0
                                                    : pretended.at(static_cast<std::size_t>(rank));
  group->memory_ = SharedMemory::create(group->store_, name, rank, size, pretended_host,
                                        options.timeout, group->hosts_);
  if (group->on_one_host()) return group;
  group->memory_->follow_losses([raw = group.get()](int peer, int via, bool has_left) {
    return raw->find_lost(peer, via, has_left);
  });
  group->wire_ = std::make_unique<Wire>(*group);
  (void)group->backend();
  return group;
}

std::shared_ptr<Group> Group::create_stub(const std::string& name, int rank, int size) {
  auto group = std::shared_ptr<Group>(new Group);
  group->rank_ = rank;
  group->size_ = size;
  group->name_ = name;
  group->hosts_ = Hosts::all_on_one(size);
  if (size > 1) group->memory_ = SharedMemory::create_stub(name, rank, size);
  return group;
}

Group::Group() {
  static std::atomic<std::uint64_t> num_made{0};
  id_ = ++num_made;
}

Group::~Group() {
  if (rank_ != 0 || found_lost_ < 0) return;
  // The store may go with this rank: the others see that it leaves, and ask first.
  wire_.reset();
  backend_.reset();
  in_a_second([store = store_, lost = found_lost_, size = size_](auto has_time) {
    for (int rank = 1; rank < size; ++rank)
      while (rank != lost && !store->check({asked_key(rank)}) && has_time()) pause();
  });
}

void Group::naming(const char* op, int peer, const std::function<void()>& f) const {
  const auto since = std::chrono::steady_clock::now();
  try {
    f();
  } catch (const std::exception& error) {
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - since;
    const int lost = find_lost(peer, peer, elapsed < timeout());
    std::string text = fmt::format("{}: group {} rank {}: ", op, name_, rank_);
    if (lost == rank_) {
      text += fmt::format("rank {} waited in vain for this rank, and gave up", peer);
    } else {
      text += fmt::format("lost rank {}", hosts_.text_of(lost));
      if (lost != peer) text += fmt::format(", which rank {} waited for", peer);
    }
    text += fmt::format(": {:.3f} s elapsed of at most {:.3f} s: {}", elapsed.count(),
                        std::chrono::duration<double>(wire_timeout()).count(), text_of(error));
    fail(lost, op,
         std::make_exception_ptr(c10::DistBackendError(
             {__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, text)));
  }
}

void Group::fail_disagreed(const char* op, const std::string& text) const {
  fail(rank_, op,
       std::make_exception_ptr(
           c10::ValueError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, text)));
}

void Group::keep(int lost, const char* op, std::exception_ptr error) const {
  const std::lock_guard lock(mutex_);
  if (error_ != nullptr) return;
  error_ = std::move(error);
  memory_->fail_from_outside(lost, op, error_);
}

void Group::fail(int lost, const char* op, std::exception_ptr error) const {
  keep(lost, op, std::move(error));
  if (!wire_->is_progress_thread()) memory_->check_usable();
  std::rethrow_exception(error_);
}

int Group::find_lost(int peer, int via, bool has_left) const {
  const std::lock_guard lock(finding_mutex_);
  if (found_lost_ >= 0) return found_lost_;
  // Without an answer it is the store's host that is lost, or frozen, or behind a wire that was cut.
  const int silent =
      options_.store_rank >= 0 && options_.store_rank != rank_ ? options_.store_rank : peer;
  auto found = std::make_shared<std::atomic<int>>(silent);
  in_a_second([=, store = store_, rank = rank_](auto has_time) {
    const auto tell = [&](int lost) {
      store->set(lost_key(rank), std::to_string(lost));
      (void)store->check({lost_key(rank)});  // an answer
      *found = lost;
    };
    tell(peer);
    for (int lost = peer; has_time(); pause()) {
      if (!store->check({lost_key(lost)})) {
        *found = lost;
        if (has_left) break;
        continue;
      }
      lost = std::stoi(store->get_to_str(lost_key(lost)));
      if (lost != rank) continue;
      // In a circle, who says nothing is frozen, and what it showed of its wait is old.
      if (store->check({lost_key(via)})) {
        *found = rank;
        lost = peer;
      } else {
        tell(lost = via);
      }
    }
    store->set(asked_key(rank), "1");
  });
  return found_lost_ = *found;
}

c10d::Backend& Group::backend() const {
  TORCH_INTERNAL_ASSERT(size_ > 1, "a group of one has no messages to send");
  if (!backend_) backend_ = make_gloo_group(store_, rank_, size_, options_.timeout, !uses_engine());
  return *backend_;
}

}  // namespace braid
