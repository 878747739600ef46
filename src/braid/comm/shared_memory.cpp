// Slots, flags and losses of a host's shared memory.
#include "braid/comm/shared_memory.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "braid/comm/region.h"
#include "braid/core/check.h"
#include "braid/core/env.h"
#include "braid/core/trace.h"

namespace braid {
namespace {

constexpr int kMaxRanks = 64;
constexpr std::chrono::milliseconds kSlice{100};  // of sleep between two looks for a loss
using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

/// What flag `result` reaches when its rank has told of a disagreement in the operation's headers.
constexpr std::uint64_t disagreed(std::int64_t sequence) {
  return static_cast<std::uint64_t>(sequence) << 16 | 0xffff;
}

/// What flag `released` reaches when its rank has left the operation.
constexpr std::uint64_t released(std::int64_t sequence) {
  return static_cast<std::uint64_t>(sequence) << 16;
}

constexpr std::size_t round_up(std::size_t n, std::size_t unit) {
  return (n + unit - 1) / unit * unit;
}

}  // namespace

/// Header and flags of one operation, all written by the region's rank. Flags are sequence << 16 | count.
/// | word      | state                                                 | who reads               | at rest         |
/// | header    | what ranks must agree on, and the slot                | all, until they release | last operation  |
/// | published | 0: the header is there; more: the payload up to there | all                     | its count       |
/// | result    | up to there, of what is made from peers' payload      | all                     | its, or earlier |
/// |           | or disagreed()                                        | all                     | the same        |
/// | started   | operations of this rank; written before disagreed()   | all, after that         | any             |
/// | released  | 0: this rank touches no slot of the operation         | starters, find_loss()   | it, or one that |
/// |           |                                                       |                         | others started  |
/// | posted    | by owner: what this rank wrote into the owner's slot  | that owner              | its, or earlier |
struct SharedMemory::Entry {
  Header header;
  Flag published;
  Flag result;
  std::int64_t started;
  Flag released;
  Flag posted[kMaxRanks];
};

/// Start of a region; all but the nonce written by the region's rank while it runs.
/// | word        | state                                                | who reads            | at rest |
/// | waits_for   | 1 + the rank it sleeps for                           | who waits in vain    | 0       |
/// | flag, until | that rank's flag (bytes into its region), the value  | the same             | any     |
/// | remote      | 1 + the rank that it waits for on another host       | who waits in vain    | 0       |
/// | lost        | 1 + the rank it saw lost, or waited for in vain      | all, while they wait | 0       |
/// | disagreed   | the last operation that it told a disagreement in    | all, while they wait | any     |
/// | lost_op     | the operation it was in; written before `lost`, once | all, after `lost`    | ""      |
struct SharedMemory::Control {
  Nonce nonce;
  std::atomic<std::int32_t> waits_for;
  std::atomic<std::uint32_t> flag;
  std::atomic<std::uint64_t> until;
  std::atomic<std::int32_t> remote;
  std::atomic<std::int32_t> lost;
  char lost_op[32];
  std::atomic<std::int64_t> disagreed;
  Entry entries[kEntries];
};

SharedMemory::SharedMemory(std::string group, Hosts hosts, int rank)
    : group_(std::move(group)), hosts_(std::move(hosts)), rank_(rank), own_(index(rank)) {}

std::unique_ptr<SharedMemory> SharedMemory::create(const c10::intrusive_ptr<c10d::Store>& store,
                                                   const std::string& group, int rank, int size,
                                                   int pretended_host,
                                                   std::chrono::milliseconds timeout,
                                                   Hosts& hosts) {
  const std::size_t bytes = control_bytes() + kSlots * env().slot_bytes;
  auto mine = Region::make(bytes);
  mine->allocate(0, control_bytes());  // zeroed: every word at rest
  Exchange exchange =
      exchange_regions(store, group, rank, size, pretended_host, kMaxRanks, mine, bytes, timeout);
  hosts = std::move(exchange.hosts);
  auto memory = std::unique_ptr<SharedMemory>(new SharedMemory(group, hosts, rank));
  memory->timeout_ = timeout;
  memory->regions_ = std::move(exchange.regions);
  memory->sockets_ = std::move(exchange.sockets);
  memory->slots_ = std::make_shared<std::vector<Slot>>(kSlots);
  // Ranks that launch_ranks pinned to a core each see one core: what counts is the whole host. Between hosts
  // the threads that bring what is waited for need this core.
  const bool has_cores = memory->size() <= ::sysconf(_SC_NPROCESSORS_ONLN);
  memory->spins_ = has_cores && hosts.count() == 1 ? env().spin : 0;
  return memory;
}

std::unique_ptr<SharedMemory> SharedMemory::create_stub(const std::string& group, int rank,
                                                        int size) {
  const auto region = Region::make(control_bytes() + kSlots * env().slot_bytes);
  region->allocate(0, control_bytes());
  auto memory =
      std::unique_ptr<SharedMemory>(new SharedMemory(group, Hosts::all_on_one(size), rank));
  memory->is_stub_ = true;
  memory->regions_.assign(static_cast<std::size_t>(size), region);
  memory->slots_ = std::make_shared<std::vector<Slot>>(kSlots);
  return memory;
}

SharedMemory::~SharedMemory() {
  for (const int socket : sockets_)
    if (socket >= 0) ::close(socket);
}

std::size_t SharedMemory::slot_offset(std::size_t slot) {
  return control_bytes() + slot * env().slot_bytes;
}

std::size_t SharedMemory::control_bytes() { return round_up(sizeof(Control), 4096); }

SharedMemory::Control& SharedMemory::control(int index) const {
  return *std::launder(
      reinterpret_cast<Control*>(regions_[static_cast<std::size_t>(index)]->data()));
}

void SharedMemory::check_usable() const {
  if (has_failed_outside_.load(std::memory_order_acquire)) {
    if (!is_told_.exchange(true)) std::rethrow_exception(failed_outside_);
    C10_THROW_ERROR(DistBackendError, fmt::format("group {} is unusable since: {}", group_,
                                                  text_of(failed_outside_)));
  }
  TORCH_CHECK_WITH(DistBackendError, failure_.empty(), "group ", group_,
                   " is unusable since: ", failure_);
}

void SharedMemory::tell(const Loss& loss) const {
  if (has_told_loss_.exchange(true)) return;
  Control& mine = control(own_);
  loss.op.copy(mine.lost_op, sizeof mine.lost_op - 1);
  mine.lost.store(1 + loss.rank, std::memory_order_release);
}

void SharedMemory::fail_from_outside(int rank, const char* op, std::exception_ptr error) {
  failed_outside_ = std::move(error);
  has_failed_outside_.store(true, std::memory_order_release);
  if (rank >= 0) tell({rank, rank_, op});
}

void SharedMemory::fail(const Loss& loss, const std::string& text) {
  check_usable();
  tell(loss);
  failure_ = text;
  C10_THROW_ERROR(DistBackendError, failure_);
}

std::optional<SharedMemory::Loss> SharedMemory::find_loss(int peer, std::int64_t sequence,
                                                          const char* op) const {
  const auto reported = [&](int by) -> std::optional<Loss> {
    const Control& region = control(by);
    const int lost = region.lost.load(std::memory_order_acquire);
    if (lost == 0) return std::nullopt;
    return Loss{lost - 1, name(by), region.lost_op};
  };
  for (int other = 0; other < size(); ++other)
    if (auto loss = reported(other)) return loss;
  for (int other = 0; other < size(); ++other) {
    const int socket = sockets_[static_cast<std::size_t>(other)];
    if (socket < 0) continue;
    pollfd entry{socket, POLLIN, 0};
    char byte = 0;
    if (::poll(&entry, 1, 0) <= 0 || ::recv(socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT) > 0)
      continue;
    if (auto loss = reported(other)) return loss;  // it left because it saw another one's loss
    const Flag& left = control(other).entries[sequence % kEntries].released;
    if (other == peer || !left.reached(released(sequence))) return Loss{name(other), rank_, op};
  }
  return std::nullopt;
}

int SharedMemory::end_of_chain(int peer) const {
  for (int step = 0; step < size(); ++step) {
    const Control& waiter = control(peer);
    const int next = waiter.waits_for.load(std::memory_order_acquire) - 1;
    if (next < 0 || next == own_ || next == peer) break;
    const auto& flag = *reinterpret_cast<const Flag*>(
        regions_[static_cast<std::size_t>(next)]->data() + waiter.flag.load());
    if (flag.reached(waiter.until.load())) break;  // it would go on, but is frozen
    peer = next;
  }
  return peer;
}

void SharedMemory::show_remote_wait(int rank) {
  control(own_).remote.store(1 + rank, std::memory_order_release);
}

void SharedMemory::wait(Flag& flag, std::uint64_t at_least, int peer, const char* op) {
  if (is_stub_ || flag.reached(at_least)) return;
  check_usable();
  const trace::Span span(trace::Kind::wait, "wait");
  if (flag.spin(at_least, spins_)) return;
  Clock::duration elapsed{};
  Control& mine = control(own_);
  mine.flag = static_cast<std::uint32_t>(reinterpret_cast<std::byte*>(&flag) -
                                         regions_[static_cast<std::size_t>(peer)]->data());
  mine.until = at_least;
  mine.waits_for.store(1 + peer, std::memory_order_release);
  auto left = timeout_;
  for (auto before = Clock::now(); !flag.sleep(at_least, std::min(kSlice, left));) {
    const auto now = Clock::now();
    elapsed +=
        std::min<Clock::duration>(now - before, 5 * kSlice);  // more: this process was stopped
    before = now;
    join_disagreement(op);
    check_usable();
    auto loss = find_loss(peer, static_cast<std::int64_t>(at_least >> 16), op);
    left = std::chrono::ceil<std::chrono::milliseconds>(timeout_ - elapsed);
    if (!loss && left.count() > 0) continue;
    if (flag.reached(at_least)) break;  // what a rank did before it was lost counts
    const std::string times = fmt::format("{:.3f} s elapsed of at most {:.3f} s",
                                          Seconds(elapsed).count(), Seconds(timeout_).count());
    const std::string who = fmt::format("{}: group {} rank {}", op, group_, rank_);
    const bool is_late = !loss;
    const int end = is_late ? end_of_chain(peer) : peer;
    if (is_late) {
      const int remote = control(end).remote.load(std::memory_order_acquire) - 1;
      loss = Loss{remote >= 0 ? remote : name(end), rank_, op};
    }
    const int first = loss->rank;
    if (follow_) loss->rank = follow_(first, is_late ? name(end) : first, !is_late);
    if (loss->rank == rank_)
      fail(*loss, fmt::format("{}: rank {} waited in vain for this rank in {}, and gave up: {}",
                              who, first == rank_ ? loss->seen_by : first, loss->op, times));
    const std::string lost = hosts_.text_of(loss->rank);
    if (is_late)
      fail(*loss,
           fmt::format("{}: rank {} did not come within the time-out: {}", who, lost, times));
    fail(*loss, fmt::format("{}: lost rank {} (it was in, or expected in, {}): {}", who, lost,
                            loss->op, times));
  }
  mine.waits_for.store(0, std::memory_order_relaxed);
}

SharedMemory::Lease SharedMemory::start(const Header& header, std::size_t bytes) {
  check_usable();
  const std::int64_t sequence = sequence_ + 1;
  wait_released(sequence - kEntries, header.op);
  const std::size_t slot = take_slot(header.op);
  const std::size_t base = slot_offset(slot);
  Slot& mine = (*slots_)[slot];
  const std::string refused = allocate(mine, base, bytes);
  sequence_ = mine.sequence = sequence;
  mine.in_flight = true;
  Entry& entry = control(own_).entries[sequence % kEntries];
  entry.header = header;
  entry.header.slot = base;
  refused.copy(entry.header.refused, sizeof entry.header.refused - 1);
  Lease lease(this, sequence, slot, entry.header.op);
  entry.published.raise(lease.progress(0));
  if (!refused.empty()) lease.agree();  // throws, as on every rank
  return lease;
}

std::string SharedMemory::allocate(Slot& slot, std::size_t base, std::size_t bytes) {
  if (bytes > env().slot_bytes)
    return fmt::format(
        "{} bytes don't fit into a slot of {} bytes. HINT: a larger BRAID_SLOT_BYTES", bytes,
        env().slot_bytes);
  if (bytes <= slot.allocated) return {};
  const std::size_t end = std::min(round_up(bytes, 1 << 16), env().slot_bytes);
  try {
    regions_[static_cast<std::size_t>(own_)]->allocate(base + slot.allocated, base + end);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  slot.allocated = end;
  return {};
}

void SharedMemory::check_waited_for(std::int64_t sequence, const char* op) const {
  for (const Slot& slot : *slots_)
    BRAID_CHECK(!slot.in_flight || slot.sequence != sequence, op, ": an operation started ",
                kEntries, " operations ago has not been waited for");
}

void SharedMemory::wait_released(std::int64_t sequence, const char* op) {
  if (sequence <= 0) return;
  check_waited_for(sequence, op);
  for (int peer = 0; peer < size(); ++peer)
    wait(control(peer).entries[sequence % kEntries].released, released(sequence), peer, op);
}

int SharedMemory::num_in_flight() const {
  return static_cast<int>(std::count_if(slots_->begin(), slots_->end(),
                                        [](const Slot& slot) { return slot.in_flight; }));
}

std::size_t SharedMemory::bytes() const {
  std::size_t sum = control_bytes();
  for (const Slot& slot : *slots_) sum += slot.allocated;
  return sum;
}

std::size_t SharedMemory::take_slot(const char* op) {
  const std::vector<Slot>& slots = *slots_;
  const int in_flight = num_in_flight();
  BRAID_CHECK(in_flight < kInFlight, op, ": ", in_flight,
              " operations are started and not waited for; ", kInFlight, " is the limit");
  std::size_t oldest = slots.size();
  for (std::size_t slot = 0; slot < slots.size(); ++slot) {
    if (slots[slot].in_flight || slots[slot].kept.load(std::memory_order_acquire)) continue;
    const std::int64_t sequence = slots[slot].sequence;
    bool free = true;
    for (int peer = 0; peer < size() && free; ++peer)
      free = control(peer).entries[sequence % kEntries].released.reached(released(sequence));
    if (free) return slot;
    if (oldest == slots.size() || sequence < slots[oldest].sequence) oldest = slot;
  }
  TORCH_INTERNAL_ASSERT(oldest < slots.size());
  wait_released(slots[oldest].sequence, op);
  return oldest;
}

std::vector<Header> SharedMemory::headers_of(std::int64_t sequence, const char* op) {
  std::vector<Header> headers;
  for (int peer = 0; peer < size(); ++peer) {
    Entry& entry = control(peer).entries[sequence % kEntries];
    wait(entry.published, released(sequence), peer, op);
    headers.push_back(entry.header);
  }
  return headers;
}

void SharedMemory::check_not_ended(std::int64_t sequence) const {
  if (sequence <= ended_) throw_disagreement();
}

void SharedMemory::join_disagreement(const char* op) {
  const std::int64_t told = control(own_).disagreed.load(std::memory_order_relaxed);
  for (int peer = 0; peer < size(); ++peer) {
    const std::int64_t theirs = control(peer).disagreed.load(std::memory_order_acquire);
    if (theirs > ended_ && (told <= ended_ || theirs < told)) fail_disagreed(theirs, op);
  }
}

void SharedMemory::fail_disagreed(std::int64_t sequence, const char* op) {
  Control& mine = control(own_);
  Entry& entry = mine.entries[sequence % kEntries];
  const std::vector<Header> headers = headers_of(sequence, op);
  const std::string text = disagreement(group_, ranks(), headers);
  const bool is_refusal = std::any_of(headers.begin(), headers.end(),
                                      [](const Header& header) { return header.refused[0] != 0; });
  entry.started = sequence_;
  entry.result.raise(disagreed(sequence));
  mine.disagreed.store(sequence, std::memory_order_release);
  std::int64_t last = sequence_;
  for (int peer = 0; peer < size(); ++peer) {
    Entry& theirs = control(peer).entries[sequence % kEntries];
    wait(theirs.result, disagreed(sequence), peer, op);
    last = std::max(last, theirs.started);
  }
  mine.waits_for.store(0, std::memory_order_relaxed);
  for (; sequence_ < last; ++sequence_) {
    const std::int64_t next = sequence_ + 1;
    check_waited_for(next - kEntries, op);
    mine.entries[next % kEntries].released.raise(released(next));
  }
  ended_ = last;
  disagreement_ = text;
  if (follow_) failure_ = text;  // other hosts don't know how far this one went
  is_refusal_ = is_refusal;
  throw_disagreement();
}

void SharedMemory::throw_disagreement() const {
  if (is_refusal_) C10_THROW_ERROR(OutOfMemoryError, disagreement_);
  C10_THROW_ERROR(ValueError, disagreement_);
}

SharedMemory::Lease::Lease(Lease&& other) noexcept
    : memory_(std::exchange(other.memory_, nullptr)),
      sequence_(other.sequence_),
      slot_(other.slot_),
      op_(other.op_),
      headers_(std::move(other.headers_)) {}

SharedMemory::Lease::~Lease() { release(); }

SharedMemory::Entry& SharedMemory::Lease::entry(int index) const {
  return memory_->control(index).entries[sequence_ % kEntries];
}

std::byte* SharedMemory::Lease::slot(int rank) const {
  const int index = memory_->index(rank);
  return memory_->regions_[static_cast<std::size_t>(index)]->data() + entry(index).header.slot;
}

void SharedMemory::Lease::agree() {
  memory_->check_not_ended(sequence_);
  if (!headers_.empty()) return;
  std::vector<Header> headers = memory_->headers_of(sequence_, op_);
  if (!disagreement(memory_->group_, memory_->ranks(), headers).empty())
    memory_->fail_disagreed(sequence_, op_);
  headers_ = std::move(headers);
}

void SharedMemory::Lease::wait(Flag& flag, int count, int peer) const {
  memory_->check_not_ended(sequence_);
  memory_->wait(flag, progress(count), peer, op_);
}

bool SharedMemory::Lease::all_have_started() const {
  for (int peer = 0; peer < memory_->size(); ++peer)
    if (!entry(peer).published.reached(progress(0))) return false;
  return true;
}

const Header& SharedMemory::Lease::header(int rank) const {
  return headers_[static_cast<std::size_t>(memory_->index(rank))];
}

void SharedMemory::Lease::publish(int count) {
  entry(memory_->own_).published.raise(progress(count));
}
void SharedMemory::Lease::wait_published(int rank, int count) const {
  const int index = memory_->index(rank);
  wait(entry(index).published, count, index);
}
void SharedMemory::Lease::publish_result(int count) {
  entry(memory_->own_).result.raise(progress(count));
}
void SharedMemory::Lease::wait_result(int rank, int count) const {
  const int index = memory_->index(rank);
  wait(entry(index).result, count, index);
}
void SharedMemory::Lease::post(int owner, int count) {
  entry(memory_->own_).posted[memory_->index(owner)].raise(progress(count));
}
void SharedMemory::Lease::wait_posted(int writer, int owner, int count) const {
  const int index = memory_->index(writer);
  wait(entry(index).posted[memory_->index(owner)], count, index);
}

std::shared_ptr<void> SharedMemory::Lease::keep_slot() {
  auto& slots = *memory_->slots_;
  int kept = 0;
  for (const Slot& slot : slots) kept += slot.kept.load(std::memory_order_acquire);
  if (kept >= kKeptSlots) return nullptr;
  slots[slot_].kept.store(true, std::memory_order_release);
  struct Guard {
    std::shared_ptr<std::vector<Slot>> slots;
    std::shared_ptr<Region> region;
    std::size_t slot;
    ~Guard() { (*slots)[slot].kept.store(false, std::memory_order_release); }
  };
  return std::shared_ptr<void>(
      new Guard{memory_->slots_, memory_->regions_[static_cast<std::size_t>(memory_->own_)], slot_},
      [](void* guard) { delete static_cast<Guard*>(guard); });
}

void SharedMemory::Lease::release() {
  if (memory_ == nullptr) return;
  SharedMemory& memory = *std::exchange(memory_, nullptr);
  (*memory.slots_)[slot_].in_flight = false;
  memory.control(memory.own_).entries[sequence_ % kEntries].released.raise(released(sequence_));
}

void SharedMemory::Lease::release_and_wait() {
  SharedMemory& memory = *memory_;
  release();
  memory.wait_released(sequence_, op_);
}

}  // namespace braid
