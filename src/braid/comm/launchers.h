// The launchers of a run over several hosts: how they meet, hear of each other's ranks and end together.
//
// NOTE [launchers]. Host 0's launcher hosts the ranks' store at the given address and port; the others find
// there the port on which it listens to them, and keep one connection to it, whose end is how a launcher's
// death is seen. Messages are JSON, one a line:
//   hello      to host 0: its number, and what must be the same on all hosts
//   welcome    from host 0, once all have come: the run's name;   refused: why, instead
//   alive      to and from host 0, four times in the time-out: who is silent for all of it (2 s at least) is lost
//   end        to and from host 0: a rank was lost, or a signal came: all end their ranks
//   ended      to host 0: how the host's ranks ended
//   outcome    from host 0, once it knows of all: what every launcher says, and its exit code
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "braid/comm/line_socket.h"
#include "braid/comm/outcome.h"

namespace braid {

/// The hosts of a run, as each host's launcher is told.
struct Nodes {
  int num = 1, rank = 0;    // host 0 has ranks 0 to num_ranks - 1
  std::string master_addr;  // of host 0; empty: one host, whose ranks meet at a loopback port
  int master_port = 29500;
  std::string interface;  // for the ranks; empty: BRAID_INTERFACE's
};

class Launchers {
 public:
  /// Waits until the launchers of all hosts have come.
  ///   Errors   on all that have come: ValueError where hosts are told different things, naming both;
  ///            DistBackendError naming address and port: what the store can't be hosted or reached for, that it
  ///            is another run's, or which hosts did not come within `timeout`
  Launchers(const Nodes& hosts, int num_ranks, std::chrono::milliseconds timeout);

  /// What tells this run from others.
  const std::string& run() const { return run_; }
  /// Readable when receive() has something to do.
  std::vector<int> sockets() const;
  /// Takes in what the others have sent, and tells them now and then that this one is there; to be called as often.
  /// Does not wait.
  void receive();
  /// That another host ends the run: the signal that ended it there, or 0.
  std::optional<int> end() const { return end_; }
  /// Ends the run on the other hosts; once.
  void end_others(int signal);
  /// This host's ranks have ended.
  void report(const std::vector<RankEnd>& ended);
  /// Whether outcome() is final: each host has reported or is lost.
  bool is_complete() const;
  /// What all launchers say and return; host 0 tells the others.
  Outcome outcome(int interrupted);

 private:
  using Clock = std::chrono::steady_clock;
  struct Host {
    LineSocket wire;           // closed: this host's own, or lost
    Clock::duration silent{};  // since it has said something
    std::optional<std::vector<RankEnd>> ended;
  };
  bool is_first() const { return hosts_.rank == 0; }
  void gather();
  void greet(LineSocket wire);
  void come();
  [[noreturn]] void refuse_all(const nlohmann::json& refusal);
  std::string name_of(int host) const;
  nlohmann::json facts() const;
  void begin_end(int host, int signal);

  Nodes hosts_;
  int num_ranks_;
  std::chrono::milliseconds timeout_;
  std::string run_;
  c10::intrusive_ptr<c10d::Store> store_;  // host 0's
  std::map<int, Host> all_;                // on host 0 all hosts, elsewhere host 0 and this one
  std::vector<int> order_;                 // hosts, as they were seen to end
  std::optional<int> end_;
  bool has_told_ = false;
  Clock::time_point received_;      // when receive() was called last
  Clock::time_point told_;          // when the others were told that this one is there
  std::optional<Outcome> outcome_;  // as host 0 has sent it
};

}  // namespace braid
