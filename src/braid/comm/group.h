// The ranks of one axis (tp, dp, ...): their hosts, the memory that those of a host share, and a
// process group of c10d for what goes between hosts.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "braid/comm/hosts.h"
#include "braid/core/env.h"

namespace braid {

class SharedMemory;
class Wire;

struct GroupOptions {
  std::chrono::milliseconds timeout = env().timeout;
  bool shared_memory = env().shared_memory;  // false: as if every rank were on a host of its own
  /// By rank; those with different ones are as on different hosts, even if they could share memory.
  std::vector<int> pretended_hosts = {};
  /// The rank that hosts the store, and is lost where that does not answer; -1: none of the group's.
  int store_rank = -1;
  /// Every collective is the process group's own, and nothing overlaps: for comparisons.
  bool engine_collectives = false;
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
  /// Of rank 0, where one was lost: stays up to a second, until the others know whom.
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() const { return name_; }
  /// Different for every Group object of this process.
  std::uint64_t id() const { return id_; }
  std::chrono::milliseconds timeout() const { return options_.timeout; }
  const Hosts& hosts() const { return hosts_; }
  bool on_one_host() const { return hosts_.count() == 1; }
  bool uses_engine() const { return options_.engine_collectives; }
  /// The memory that the ranks of this host map. Null in a group of one.
  SharedMemory* memory() const { return memory_.get(); }
  /// Messages to other hosts. Null in a group on one host.
  Wire* wire() const { return wire_.get(); }
  /// The process group; on one host it is connected at its first use: collective then. Not for groups of one.
  c10d::Backend& backend() const;

  /// Runs `f`, which sends to `peer`, receives from it or waits for that: what the process group throws becomes
  /// a loss of the peer. The ranks that lost one tell each other through the store whom, so that
  /// neighbours don't blame each other. Errors: DistBackendError, now and in further calls, and of
  /// whoever waits in the group's memory.
  void naming(const char* op, int peer, const std::function<void()>& f) const;
  /// Another host's rank has another header. Errors: ValueError now, DistBackendError in further calls.
  [[noreturn]] void fail_disagreed(const char* op, const std::string& text) const;
  /// Makes the group unusable, unless something else has: all further calls throw the first error. The host's other
  /// ranks learn that rank `lost` was lost in `op`.
  void keep(int lost, const char* op, std::exception_ptr error) const;
  /// The longest wait for a message: longer than one in memory, so that who waits for this host's ranks says why.
  std::chrono::milliseconds wire_timeout() const { return timeout() + std::chrono::seconds(1); }

 private:
  Group();
  [[noreturn]] void fail(int lost, const char* op, std::exception_ptr error) const;
  /// Tells the run that this rank lost `peer`, for which `via` of this host seems to wait (or is `peer`), and finds
  /// out whom that one has lost. Who has left has said so before; one that only did not come may do so within a
  /// second, which this takes at most. What was found first stays.
  int find_lost(int peer, int via, bool has_left) const;
  std::uint64_t id_;
  int rank_ = 0, size_ = 1;
  std::string name_;
  GroupOptions options_;
  Hosts hosts_;
  c10::intrusive_ptr<c10d::Store> store_;
  mutable c10::intrusive_ptr<c10d::Backend> backend_;
  std::unique_ptr<SharedMemory> memory_;
  std::unique_ptr<Wire> wire_;
  mutable std::mutex mutex_;
  mutable std::exception_ptr error_;  // why the group is unusable
  mutable std::mutex finding_mutex_;
  mutable int found_lost_ = -1;
};

}  // namespace braid
