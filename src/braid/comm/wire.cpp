// Messages between hosts and the progress thread.
#include "braid/comm/wire.h"

#include <c10/util/ParallelGuard.h>
#include <c10/util/hash.h>
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string_view>
#include <utility>

#include "braid/comm/pipe_signal.h"
#include "braid/comm/slot_tensor.h"

namespace braid {
namespace {

at::Tensor bytes_of(const Header& header) {
  at::Tensor bytes = at::empty({sizeof header}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), &header, sizeof header);
  return bytes;
}

std::uint32_t hash_of(const Header& header) {
  const std::int64_t rows = header.rows_agree ? header.rows : -1;
  return static_cast<std::uint32_t>(c10::get_hash(std::string_view(header.op), header.dtype,
                                                  header.n, header.k, header.variant, rows));
}

}  // namespace

void Message::wait() {
  if (work_ != nullptr) wire_->wait(*this);
}

Wire::~Wire() {
  {
    std::unique_lock lock(mutex_);
    ends_ = true;
    give_up(lock);
  }
  if (thread_.joinable()) thread_.join();
}

Wire::Operation::Operation(Wire& wire, const char* name, const Header& header)
    : wire_(wire), name_(name), hash_(hash_of(header)) {
  constexpr int kSequences = 1 << 12;
  sequence_ = wire.sequence_ = (wire.sequence_ + 1) % kSequences;
  if (wire.agreed_.insert(hash_).second) compare(header);
}

Wire::Operation::~Operation() {
  try {
    finish();
  } catch (const std::exception&) {  // the group has it
  }
}

void Wire::Operation::finish() {
  wait_for_steps();
  if (!wire_.group_.memory()->is_usable()) return;
  for (const Hop hop : {Hop::header, Hop::first, Hop::second}) wait_sent(hop);
}

void Wire::Operation::wait_sent(Hop hop) {
  std::vector<Message> messages;
  {
    const std::lock_guard lock(wire_.mutex_);
    for (auto& [sent_in, message] : sent_)
      if (sent_in == hop) messages.push_back(std::exchange(message, {}));
  }
  for (Message& message : messages) message.wait();
}

void Wire::Operation::wait_for_steps() {
  std::unique_lock lock(wire_.mutex_);
  if (*left_ > 0 && !wire_.group_.memory()->is_usable()) wire_.give_up(lock);
  wire_.changed_.wait(lock, [this] { return *left_ == 0; });
}

void Wire::Operation::compare(const Header& header) {
  const Hosts& hosts = wire_.group_.hosts();
  const int rank = wire_.group_.rank();
  std::vector<int> ranks = hosts.guests(rank);
  ranks.push_back(rank);
  std::sort(ranks.begin(), ranks.end());
  std::vector<at::Tensor> headers;
  std::vector<Message> messages;
  for (const int peer : ranks) {
    headers.push_back(bytes_of(header));
    if (peer != rank) messages.push_back(receive(Hop::header, headers.back(), peer));
  }
  for (const int host : hosts.others(rank))
    send(Hop::header, bytes_of(header), hosts.proxy(rank, host));
  submit([this, ranks, headers, messages]() mutable {
    for (Message& message : messages) message.wait();
    std::vector<Header> all;
    for (const at::Tensor& bytes : headers)
      std::memcpy(&all.emplace_back(), bytes.const_data_ptr(), sizeof(Header));
    const std::string text = disagreement(wire_.group_.name(), ranks, all);
    if (text.empty()) return;
    wait_sent(Hop::header);  // so that the peers say the same
    wire_.group_.fail_disagreed(name_, text);
  });
}

int Wire::Operation::tag(Hop hop, const at::Tensor& x) const {
  const std::uint32_t hash =
      hop == Hop::header ? 0 : static_cast<std::uint32_t>(c10::get_hash(hash_, x.nbytes()));
  return sequence_ << 19 | static_cast<int>(hop) << 17 | static_cast<int>(hash & 0x1ffff);
}

template <class Post>
Message Wire::Operation::post(const at::Tensor& x, int peer, Post&& start) {
  Message message;
  if (!wire_.is_progress_thread()) wire_.group_.memory()->check_usable();
  if (x.numel() == 0) return message;
  message.wire_ = &wire_;
  message.peer_ = peer;
  message.op_ = name_;
  std::vector<at::Tensor> tensors{x};
  wire_.group_.naming(name_, peer, [&] {
    const std::lock_guard lock(wire_.post_mutex_);
    const NoPipeSignal no_signal;
    message.work_ = start(wire_.group_.backend(), tensors);
  });
  return message;
}

void Wire::Operation::send(Hop hop, const at::Tensor& x, int peer) {
  Message message = post(x, peer, [&](c10d::Backend& backend, auto& tensors) {
    return backend.send(tensors, peer, tag(hop, x));
  });
  const std::lock_guard lock(wire_.mutex_);
  sent_.emplace_back(hop, std::move(message));
}

Message Wire::Operation::receive(Hop hop, const at::Tensor& x, int peer) {
  return post(x, peer, [&](c10d::Backend& backend, auto& tensors) {
    return backend.recv(tensors, peer, tag(hop, x));
  });
}

void Wire::Operation::submit(std::function<void()> step) { wire_.submit({std::move(step), left_}); }

void Wire::wait(Message& message) {
  bool done = false;
  const auto wait = [&] { done = message.work_->wait(group_.wire_timeout()); };
  if (!is_progress_thread()) {
    const trace::Span span(trace::Kind::wait, "wait");
    group_.naming(message.op_, message.peer_, wait);
  } else {
    const auto show = [&](c10::intrusive_ptr<c10d::Work> work, int peer) {
      const std::lock_guard lock(mutex_);
      TORCH_CHECK(!given_up_, "the group is unusable");
      awaited_ = std::move(work);
      group_.memory()->show_remote_wait(peer);
    };
    show(message.work_, message.peer_);
    group_.naming(message.op_, message.peer_, [&] {
      try {
        wait();
      } catch (const std::exception&) {
        const std::lock_guard lock(mutex_);
        if (!given_up_) throw;  // else: aborted, no peer's fault
      }
    });
    show(nullptr, -1);
  }
  TORCH_CHECK(done, "the group is unusable");
  message.work_ = nullptr;
}

void Wire::submit(Step step) {
  {
    const std::lock_guard lock(mutex_);
    if (given_up_) return;
    ++*step.left;
    steps_.push_back(std::move(step));
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  }
  changed_.notify_all();
}

void Wire::give_up(std::unique_lock<std::mutex>&) {
  given_up_ = true;
  for (const Step& step : std::exchange(steps_, {})) --*step.left;
  if (awaited_ != nullptr) awaited_->abort();
  changed_.notify_all();
}

void Wire::run() {
  ::pthread_setname_np(::pthread_self(), "braid wire");
  const c10::ParallelGuard alone(true);
  const NoPipeSignal no_signal;
  for (std::unique_lock lock(mutex_);;) {
    changed_.wait(lock, [this] { return ends_ || !steps_.empty(); });
    if (ends_) return;
    Step step = std::move(steps_.front());
    steps_.pop_front();
    lock.unlock();
    bool failed = false;
    try {
      step.run();
    } catch (const std::exception&) {
      failed = true;
      lock.lock();
      const bool is_aborted = given_up_;
      lock.unlock();
      if (!is_aborted) group_.keep(group_.rank(), "a step between hosts", std::current_exception());
    }
    step.run = nullptr;  // what it holds goes before its operation
    lock.lock();
    if (failed) give_up(lock);
    --*step.left;
    changed_.notify_all();
  }
}

}  // namespace braid
