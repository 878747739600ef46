// Messages between the hosts of a group, over its process group, and the thread that takes them further.
//
// NOTE [steps]. A message of Gloo can be waited for but not polled. What follows on an arrival - to tell the ranks
// of the host, to sum partials and send the sum on - is a step: the group's progress thread runs steps one after
// the other, in the order in which operations submit them, and sleeps in the wait of the one that is due. A step
// may wait only for messages that peers send once they have started the operation, whatever else they
// wait for; so operations that all ranks start in the same order never wait for each other in a circle.
//
// NOTE [tags]. A message's tag holds the operation's number among those in flight, the hop, and a hash of the
// operation's header and of the message's bytes. So what ranks that disagree send never meets what the others
// wait for. The headers themselves travel when an operation has one for the first time; ranks that differ then
// throw the same ValueError. Ranks that come to different operations, all known, wait in vain until the time-out.
#pragma once

#include <ATen/ATen.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "braid/comm/group.h"
#include "braid/comm/shared_memory.h"

namespace braid {

class Wire;

/// A message under way, which keeps its tensor. Empty ones are not sent.
class Message {
 public:
  Message() = default;
  /// Waits until it has arrived, or was taken by the network. Errors: DistBackendError, by Group::naming.
  void wait();

 private:
  friend class Wire;
  Wire* wire_ = nullptr;
  c10::intrusive_ptr<c10d::Work> work_;
  int peer_ = -1;
  const char* op_ = "";
};

/// Used by the thread that uses the group, and by the steps.
class Wire {
 public:
  explicit Wire(const Group& group) : group_(group) {}
  /// Ends the thread, whatever it waits for.
  ~Wire();
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  class Operation;
  bool is_progress_thread() const { return std::this_thread::get_id() == thread_.get_id(); }

 private:
  friend class Message;
  struct Step {
    std::function<void()> run;
    std::shared_ptr<int> left;
  };
  void submit(Step step);
  /// Takes no more steps, and ends the one that waits.
  void give_up(std::unique_lock<std::mutex>& lock);
  void run();
  void wait(Message& message);

  const Group& group_;
  int sequence_ = 0;
  std::set<std::uint32_t> agreed_;  // hashes of headers
  std::mutex post_mutex_;
  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::deque<Step> steps_;
  c10::intrusive_ptr<c10d::Work> awaited_;  // by the thread
  bool ends_ = false, given_up_ = false;
  std::thread thread_;
};

enum class Hop : std::uint8_t { header, first, second };

/// One operation's messages and steps. Made in the same order on all ranks; compares headers with guests and
/// proxies (comm/hosts.h), as its first step, when the group has this one for the first time.
class Wire::Operation {
 public:
  ///   name   the header's, a string literal
  Operation(Wire& wire, const char* name, const Header& header);
  /// Waits for the steps and for what was sent, which peers need whatever happened here; drops them when the group
  /// is unusable.
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  /// Messages of one hop from one rank to another arrive in the order in which they are sent. Post receives first.
  void send(Hop hop, const at::Tensor& x, int peer);
  Message receive(Hop hop, const at::Tensor& x, int peer);
  /// Waits until the network has taken what was sent in this hop. Errors: as finish().
  void wait_sent(Hop hop);
  /// Runs `step` on the progress thread, see NOTE [steps]. When one of the group throws, all later ones
  /// are dropped.
  void submit(std::function<void()> step);
  /// Waits for the steps, and until the network has taken all that was sent. Errors: DistBackendError, by
  /// Group::naming.
  void finish();

 private:
  void compare(const Header& header);
  int tag(Hop hop, const at::Tensor& x) const;
  void wait_for_steps();
  template <class Post>
  Message post(const at::Tensor& x, int peer, Post&& start);

  Wire& wire_;
  const char* name_;
  int sequence_;
  std::uint32_t hash_;
  std::shared_ptr<int> left_ = std::make_shared<int>(0);  // steps
  std::vector<std::pair<Hop, Message>> sent_;
};

}  // namespace braid
