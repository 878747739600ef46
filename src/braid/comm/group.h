// The ranks of one axis (tp, dp, ...): a process group of c10d, and the memory they share when they
// are on one host.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "braid/core/env.h"

namespace braid {

class SharedMemory;

struct GroupOptions {
  std::chrono::milliseconds timeout = env().timeout;
  bool shared_memory = env().shared_memory;  // false: everything goes through the process group
};

/// Ranks 0..size-1 of one axis. Used by one thread at a time; all ranks start the same operations
/// in the same order. It must outlive operations that are started; results may outlive it.
class Group {
 public:
  /// Makes the group. Collective: every rank with the same name, size and options; names are used
  /// once per store. Errors: ValueError on a rank outside 0..size-1, or when a rank says another size;
  /// DistBackendError when a peer does not come within the time-out.
  static std::shared_ptr<Group> create(const c10::intrusive_ptr<c10d::Store>& store,
                                       const std::string& name, int rank, int size,
                                       GroupOptions options = {});
  /// A group of `size` ranks without the others, for timing: see SharedMemory::create_stub. Not collective.
  static std::shared_ptr<Group> create_stub(const std::string& name, int rank, int size);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() const { return name_; }
  /// Different for every Group object of this process.
  std::uint64_t id() const { return id_; }
  std::chrono::milliseconds timeout() const { return options_.timeout; }
  /// The memory that all ranks map, or null: ranks on several hosts, or switched off, or a group of one.
  SharedMemory* memory() const { return memory_.get(); }
  /// The process group, connected at its first use: collective then. Not for groups of one.
  /// Errors: DistBackendError after fail().
  c10d::Backend& backend() const;
  /// A message over the process group failed: throws DistBackendError. `lost` is whom it was for or
  /// from; ranks tell each other by the store who saw a loss first, so that neighbours don't blame
  /// each other. Further calls are refused.
  [[noreturn]] void fail(const std::string& lost, std::string why) const;

  /// A tag for point-to-point messages, different for every operation in flight; the same on all ranks.
  int next_tag() const { return static_cast<int>(++num_tags_ & 0x3fffffff); }

 private:
  Group();
  void check_usable() const;
  std::uint64_t id_;
  int rank_ = 0, size_ = 1;
  std::string name_;
  GroupOptions options_;
  c10::intrusive_ptr<c10d::Store> store_;
  mutable c10::intrusive_ptr<c10d::Backend> backend_;
  std::unique_ptr<SharedMemory> memory_;
  mutable std::string lost_;
  mutable std::int64_t num_tags_ = 0;
};

}  // namespace braid
