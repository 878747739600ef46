// Memory that the ranks of a group on one host map: a region per rank, with slots for operations in
// flight and flags. Ranks have the numbers that they have in the group.
//
// NOTE [lease]. Flags and headers of an operation lie in entry (sequence number % kEntries) of
// every region: ranks that start the same operations in the same order need no other agreement.
// Payload lies in a slot that its owner chooses among its `kSlots` and names in its header. Entry
// and slot are used again only after every rank has released the operation they served; the starter
// waits there, not the readers. So a long-lived operation holds up nobody. Where ranks wait for n
// operations in flight in different orders, more than ranks * (n - 1) slots must hold no kept result.
//
// NOTE [reserved]. A slot is env().slot_bytes of address space in a memfd; pages appear when first
// used (allocated by fallocate, so that a host without memory is an error and not a SIGBUS). So
// regions never grow, move or get remapped, and no name exists that a killed run could leave behind.
//
// NOTE [loss]. Regions are passed over abstract unix sockets that stay open: a peer's death is its
// EOF. It matters to whoever waits for that peer, and to all in an operation that the peer has not
// released; who released has raised all its flags, and may leave. Who first sees a loss, or waits in
// vain, writes it into its own region; everyone looks there before it reports. Sleepers also write
// whom they wait for, so that a time-out names the end of the chain and not a neighbour.
//
// NOTE [disagreement]. Headers that differ are the same ValueError on every rank, one by which a rank
// says that it has no memory the same OutOfMemoryError. Ranks that cut the same work differently may
// have started different numbers of operations by then: all tell theirs in the entry of the operation
// that failed, from whatever they wait in, and go on from the largest. All operations up to there are
// over: who is in one, or comes to one, meets the same error, and nobody starts another in between.
// Of several disagreements at once the earliest counts. So the group stays usable, provided that all
// ranks go on from the same point of their program.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "braid/comm/flag.h"
#include "braid/comm/header.h"
#include "braid/comm/hosts.h"

namespace braid {

class Region;

class SharedMemory {
 public:
  static constexpr int kInFlight = 16;  // operations that a rank may have started and not finished
  static constexpr int kKeptSlots = 8;  // at most, for results that stay where they were made
  static constexpr int kSlots = kInFlight + kKeptSlots;  // so that kept results refuse no operation
  static constexpr int kEntries = 128;

  /// Maps the regions of the group's ranks that are on this host, maybe none but this one's, and
  /// says where the others are (exchange_regions). Collective over the group. Ranks that are threads of
  /// one process share one mapping. Errors: DistBackendError when a peer does not come within the time-out.
  static std::unique_ptr<SharedMemory> create(const c10::intrusive_ptr<c10d::Store>& store,
                                              const std::string& group, int rank, int size,
                                              int pretended_host, std::chrono::milliseconds timeout,
                                              Hosts& hosts);
  /// A stand-in for timing what is left without transfers: every peer's region is this rank's own
  /// and waits return at once, so results are wrong. Collective matmuls copy no payload.
  static std::unique_ptr<SharedMemory> create_stub(const std::string& group, int rank, int size);
  ~SharedMemory();

  class Lease;
  /// Starts an operation: takes its slot, allocates `bytes` of this rank's part and shows the
  /// header. Errors: ValueError when kInFlight operations of this rank are unfinished;
  /// c10::OutOfMemoryError, as a disagreement on every rank, naming the one whose bytes exceed a slot
  /// or whose host has no memory.
  Lease start(const Header& header, std::size_t bytes);

  /// Makes the memory refuse further calls, and whoever waits in it throw `error`: for a loss that is
  /// seen elsewhere. The host's other ranks learn that `rank` was lost in `op`. Once, from any thread.
  void fail_from_outside(int rank, const char* op, std::exception_ptr error);
  /// Errors: the error of fail_from_outside(), DistBackendError when the memory refuses calls otherwise.
  void check_usable() const;
  bool is_usable() const {
    return failure_.empty() && !has_failed_outside_.load(std::memory_order_acquire);
  }
  /// Called with whom this rank lost, who of this host waits for that one (or the same) and whether it is known to
  /// have left; gives whom that one lost, or the same.
  using Follow = std::function<int(int rank, int via, bool has_left)>;
  void follow_losses(Follow follow) { follow_ = std::move(follow); }
  /// Whom a thread of this rank waits for that is on another host, or -1.
  void show_remote_wait(int rank);

  /// Operations of this rank that are started and not finished.
  int num_in_flight() const;
  /// Bytes of this rank's region that have memory: flags and what its slots have needed at most.
  std::size_t bytes() const;

  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

 private:
  struct Control;
  struct Entry;
  SharedMemory(std::string group, Hosts hosts, int rank);

  /// Of this host, by index.
  const std::vector<int>& ranks() const { return hosts_.neighbours(rank_); }
  int size() const { return static_cast<int>(ranks().size()); }
  /// The place of a rank of this host: what functions here are called with.
  int index(int rank) const { return hosts_.index(rank); }
  int name(int index) const { return ranks()[static_cast<std::size_t>(index)]; }
  static std::size_t control_bytes();
  static std::size_t slot_offset(std::size_t slot);
  Control& control(int index) const;
  struct Loss {
    int rank, seen_by;  // as the group numbers them
    std::string op;     // that it was in, or expected in
  };
  /// Waits for a flag of `peer`; `op` is for errors.
  void wait(Flag& flag, std::uint64_t at_least, int peer, const char* op);
  /// A loss that matters to who waits for `peer` in operation `sequence`.
  std::optional<Loss> find_loss(int peer, std::int64_t sequence, const char* op) const;
  /// Whom of this host a rank that waits for `peer` in vain really waits for.
  int end_of_chain(int peer) const;
  /// Shows the first loss to the host's other ranks.
  void tell(const Loss& loss) const;
  /// Tells all, and makes this group refuse further calls.
  [[noreturn]] void fail(const Loss& loss, const std::string& text);
  [[noreturn]] void throw_disagreement() const;
  /// Errors: as throw_disagreement() when a disagreement has ended operation `sequence`.
  void check_not_ended(std::int64_t sequence) const;
  /// Errors: ValueError when this rank itself is still in operation `sequence`.
  void check_waited_for(std::int64_t sequence, const char* op) const;
  void wait_released(std::int64_t sequence, const char* op);
  struct Slot;
  /// Gives memory to the first `bytes` of a slot that begins at `base`; returns why not, or "".
  std::string allocate(Slot& slot, std::size_t base, std::size_t bytes);
  /// A slot of this rank that nobody touches any more; waits for one.
  std::size_t take_slot(const char* op);
  /// Every rank's header of an operation, waiting for it.
  std::vector<Header> headers_of(std::int64_t sequence, const char* op);
  /// Brings all ranks to one sequence number, since the headers of operation `sequence` differ.
  /// Errors: the same on every rank.
  [[noreturn]] void fail_disagreed(std::int64_t sequence, const char* op);
  /// The same when a peer has told of one that is new to this rank, or earlier than its own.
  void join_disagreement(const char* op);

  std::string group_;
  const Hosts hosts_;
  const int rank_;
  const int own_;  // the index of this rank
  int spins_ = 0;
  bool is_stub_ = false;
  std::chrono::milliseconds timeout_{};
  std::vector<std::shared_ptr<Region>> regions_;  // by index
  std::vector<int> sockets_;                      // by index; -1 for this one
  struct Slot {
    std::size_t allocated = 0;  // bytes that have pages
    std::int64_t sequence = 0;  // of the operation it serves or served last
    bool in_flight = false;     // that operation is not released by this rank
    std::atomic<bool> kept{
        false};  // a result lies in it; cleared by whichever thread frees the result
  };
  std::shared_ptr<std::vector<Slot>> slots_;  // of this rank's region
  std::int64_t sequence_ = 0;
  std::string failure_;  // why the group is unusable
  Follow follow_;
  std::exception_ptr failed_outside_;  // set before has_failed_outside_
  std::atomic<bool> has_failed_outside_{false};
  mutable std::atomic<bool> is_told_{false};  // that error was thrown as it is
  mutable std::atomic<bool> has_told_loss_{false};
  std::string disagreement_;  // the last one
  bool is_refusal_ = false;   // of a rank without memory
  std::int64_t ended_ = 0;    // operations up to here are over since then
};

/// One operation of this rank, and of the others on its host. Counts grow from 1; waits are for "at least".
class SharedMemory::Lease {
 public:
  Lease(Lease&& other) noexcept;
  Lease& operator=(Lease&&) = delete;
  ~Lease();  // releases

  bool is_stub() const { return memory_->is_stub_; }

  /// The payload of this operation in `rank`'s region; a peer's only after agree().
  std::byte* slot(int rank) const;

  /// Waits for every rank's header and compares them. Errors, of every wait: the same on every rank
  /// (NOTE [disagreement]) when the headers of this or another operation in flight differ.
  void agree();
  /// True when agree() would not wait.
  bool all_have_started() const;
  /// Valid after agree().
  const Header& header(int rank) const;

  /// "My payload is there up to count", to all.
  void publish(int count);
  void wait_published(int rank, int count) const;
  /// As publish, for what is made from the peers' payload (reduced tiles).
  void publish_result(int count);
  void wait_result(int rank, int count) const;
  /// "What I wrote into the owner's slot is there up to count."
  void post(int owner, int count);
  void wait_posted(int writer, int owner, int count) const;

  /// Keeps this rank's slot beyond the operation, for a result that lies in it, until the returned
  /// guard is gone (the region lives as long). Null when kKeptSlots are kept already: copy the result.
  [[nodiscard]] std::shared_ptr<void> keep_slot();

  /// "I don't touch anyone's slot any more." Then the slot's memory may change at any time.
  void release();
  /// Releases, and waits until every peer has: nobody reads this rank's slot any more.
  void release_and_wait();

 private:
  friend class SharedMemory;
  Lease(SharedMemory* memory, std::int64_t sequence, std::size_t slot, const char* op)
      : memory_(memory), sequence_(sequence), slot_(slot), op_(op) {}
  Entry& entry(int index) const;
  void wait(Flag& flag, int count, int peer) const;
  std::uint64_t progress(int count) const {
    return static_cast<std::uint64_t>(sequence_) << 16 | static_cast<std::uint64_t>(count);
  }
  SharedMemory* memory_;
  std::int64_t sequence_;
  std::size_t slot_;  // of this rank
  const char* op_;
  std::vector<Header> headers_;
};

}  // namespace braid
