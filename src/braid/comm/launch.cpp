// Starts ranks on this host, watches them and ends them together, with those of other hosts.
#include "braid/comm/launch.h"

#include <net/if.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <functional>
#include <optional>
#include <utility>

#include "braid/comm/cores.h"
#include "braid/comm/join.h"
#include "braid/comm/spawn.h"
#include "braid/core/check.h"
#include "braid/core/env.h"
#include "braid/core/log.h"

namespace braid {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kGraceAfterLoss{500};
constexpr std::chrono::milliseconds kGraceAfterInterrupt{5000};
constexpr std::chrono::milliseconds kGraceOfOthers{
    7000};  // for other hosts to tell how their ranks ended
constexpr std::chrono::milliseconds kStoreTimeout{1000};  // of a report
// A thread of the caller that does not block SIGCHLD may take it: ranks are looked at this often anyway.
constexpr std::chrono::milliseconds kMostWait{250};

/// Blocks SIGCHLD and, unless they are ignored, SIGINT, SIGTERM and SIGTSTP, to take them one by one;
/// restores all in the end.
class Signals {
 public:
  Signals() {
    struct sigaction fresh {};
    fresh.sa_handler = SIG_DFL;
    sigaction(SIGCHLD, &fresh, &child_action_);  // an inherited SIG_IGN would lose exit codes
    sigemptyset(&set_);
    sigaddset(&set_, SIGCHLD);
    for (int signal : {SIGINT, SIGTERM, SIGTSTP}) {
      struct sigaction now {};
      sigaction(signal, nullptr, &now);
      if (now.sa_handler != SIG_IGN) sigaddset(&set_, signal);
    }
    pthread_sigmask(SIG_BLOCK, &set_, &old_);
    readable_ = Descriptor(::signalfd(-1, &set_, SFD_CLOEXEC));
    TORCH_CHECK(readable_.get() >= 0, "signalfd: ", std::strerror(errno));
  }
  ~Signals() {
    const timespec none{};
    while (sigtimedwait(&set_, nullptr, &none) > 0) continue;
    pthread_sigmask(SIG_SETMASK, &old_, nullptr);
    sigaction(SIGCHLD, &child_action_, nullptr);
  }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  const sigset_t& mask_before() const { return old_; }

  /// Waits for a signal, for a socket to be readable or for the deadline; kMostWait at most.
  void wait(const std::vector<int>& sockets, std::optional<Clock::time_point> deadline) const {
    std::vector<pollfd> entries{{readable_.get(), POLLIN, 0}};
    for (const int socket : sockets) entries.push_back({socket, POLLIN, 0});
    const auto latest = Clock::now() + kMostWait;
    ::poll(entries.data(), entries.size(), left_ms(std::min(deadline.value_or(latest), latest)));
  }

  /// The next signal that has come, or 0.
  int next() const {
    const timespec none{};
    return std::max(sigtimedwait(&set_, nullptr, &none), 0);
  }

 private:
  sigset_t set_{}, old_{};
  Descriptor readable_;  // while a signal is there
  struct sigaction child_action_ {};
};

struct Rank : RankEnd {
  bool running = true;
};

constexpr int kMostRanks = 4096;  // on a host

/// Lifts this process's limit of open files, and so its ranks', as far as it may; what is short of a
/// run's need is said before one starts.
void allow_open_files() {
  constexpr rlim_t kNeeded = 64;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
  BRAID_CHECK(limit.rlim_max >= kNeeded, "a process may open ", limit.rlim_max, " files, at least ",
              kNeeded, " are needed. HINT: ulimit -n");
}

class Supervisor {
 public:
  Supervisor(int num_ranks, int host) : ranks_(static_cast<std::size_t>(num_ranks)) {
    for (auto& rank : ranks_) rank.host = host;
  }
  /// No rank outlives it.
  ~Supervisor() {
    send_all(SIGKILL);
    for (auto& rank : ranks_) {
      if (rank.pid > 0 && rank.running) waitpid(rank.pid, nullptr, 0);
    }
  }
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  /// Starts rank i of this host as `place_of(i)`.
  void start_all(const std::string& program, const std::vector<std::string>& arguments,
                 const std::string& interface, const std::function<Place(int)>& place_of) {
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      const Place place = place_of(static_cast<int>(i));
      auto environment = environment_of_rank(place);
      environment.insert_or_assign("BRAID_LAUNCHED", program == kThisProgram ? "self" : "1");
      if (!interface.empty()) environment.insert_or_assign("BRAID_INTERFACE", interface);
      for (const auto& [name, value] : for_other_programs(environment["BRAID_INTERFACE"]))
        environment.emplace(name, value);
      ranks_[i].rank = place.rank;
      ranks_[i].pid = spawn(program, arguments, environment, signals_.mask_before());
    }
  }

  /// Until all ranks have ended, here and on the other hosts.
  void watch(Launchers* others) {
    bool reported = false;
    while (runs() || (others != nullptr && !others->is_complete() && !gives_up())) {
      signals_.wait(others != nullptr ? others->sockets() : std::vector<int>(),
                    runs() ? deadline_ : others_deadline_);
      while (const int signal = signals_.next()) {
        if (signal == SIGINT || signal == SIGTERM) interrupt(signal);
        if (signal == SIGTSTP) pause();
      }
      reap();
      if (others != nullptr) {
        others->receive();
        if (const auto signal = others->end(); signal && !is_ending()) {
          if (*signal != 0)
            interrupt(*signal);
          else
            lose();
        }
        if (is_ending()) others->end_others(interrupted_);
        if (!runs() && !std::exchange(reported, true)) others->report(ended());
      }
      if (deadline_ && Clock::now() >= *deadline_) {
        send_all(SIGKILL);
        deadline_.reset();
      }
    }
  }

  /// This host's ranks that have ended, in this order.
  std::vector<RankEnd> ended() const {
    std::vector<RankEnd> ends;
    for (const std::size_t i : ended_) ends.push_back(ranks_[i]);
    return ends;
  }
  int interrupted() const { return interrupted_; }

 private:
  /// What programs that know nothing of braid's variables go by.
  Environment for_other_programs(const std::string& interface) const {
    Environment values;
    if (ranks_.size() > 1)
      values["OMP_NUM_THREADS"] =
          std::to_string(std::max<std::size_t>(1, allowed_cores().size() / ranks_.size()));
    if (::if_nametoindex(interface.c_str()) != 0) values["GLOO_SOCKET_IFNAME"] = interface;
    return values;
  }
  bool runs() const {
    return std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.running; });
  }
  bool is_ending() const { return losing_ || interrupted_ != 0; }
  bool gives_up() const { return others_deadline_ && Clock::now() >= *others_deadline_; }

  /// A rank is lost.
  void lose() {
    losing_ = true;
    send_all(SIGTERM);
    deadline_ = Clock::now() + kGraceAfterLoss;
    others_deadline_ = Clock::now() + kGraceOfOthers;
  }

  void interrupt(int signal) {
    if (std::exchange(interrupted_, signal) != 0) {
      others_deadline_ = Clock::now();
      return send_all(SIGKILL);
    }
    send_all(signal);
    deadline_ = Clock::now() + kGraceAfterInterrupt;
    others_deadline_ = Clock::now() + kGraceOfOthers;
  }

  /// Stops the ranks and this process; goes on when it is continued.
  void pause() {
    for (const auto& rank : ranks_) {
      if (rank.running) kill(-rank.pid, SIGSTOP);
    }
    raise(SIGSTOP);
    for (const auto& rank : ranks_) {
      if (rank.running) kill(-rank.pid, SIGCONT);
    }
  }

  void reap() {
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      Rank& rank = ranks_[i];
      siginfo_t info{};
      if (!rank.running ||
          waitid(P_PID, static_cast<id_t>(rank.pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
          info.si_pid != rank.pid) {
        continue;
      }
      kill(-rank.pid, SIGKILL);  // what it has started; its number is not free before waitpid
      waitpid(rank.pid, &rank.status, 0);
      rank.running = false;
      ended_.push_back(i);
      if (rank.status != 0 && !is_ending()) lose();
    }
  }

  void send_all(int signal) {
    for (auto& rank : ranks_) {
      if (rank.pid <= 0 || !rank.running) continue;
      rank.ending_with = signal;
      if (kill(-rank.pid, signal) != 0) kill(rank.pid, signal);  // before its setpgid
    }
  }

  Signals signals_;
  std::vector<Rank> ranks_;
  std::vector<std::size_t> ended_;                    // in this order
  std::optional<Clock::time_point> deadline_;         // of the ranks that are to end
  std::optional<Clock::time_point> others_deadline_;  // of the other hosts
  int interrupted_ = 0;                               // the first signal that was passed on
  bool losing_ = false;
};

}  // namespace

int launch_ranks(int num_ranks, const std::vector<std::string>& arguments,
                 const std::string& program, const Nodes& hosts) {
  BRAID_CHECK(num_ranks >= 1 && num_ranks <= kMostRanks, "the number of ranks is ", num_ranks,
              ", expected 1 to ", kMostRanks);
  allow_open_files();
  std::fflush(nullptr);
  std::optional<Launchers> others;
  if (!hosts.master_addr.empty()) others.emplace(hosts, num_ranks, env().timeout);
  Supervisor supervisor(num_ranks, hosts.rank);
  Outcome outcome;
  if (others) {
    supervisor.start_all(program, arguments, hosts.interface, [&](int local_rank) {
      Place place = place_on_this_host(local_rank, num_ranks, hosts.master_port);
      place.rank += hosts.rank * num_ranks;
      place.world_size *= hosts.num;
      place.master_addr = hosts.master_addr;
      place.run = others->run();
      return place;
    });
    supervisor.watch(&*others);
    outcome = others->outcome(supervisor.interrupted());
  } else {
    HostedStore hosted;
    const int port = hosted.port();
    const auto store = hosted.start();
    supervisor.start_all(program, arguments, hosts.interface, [&](int local_rank) {
      return place_on_this_host(local_rank, num_ranks, port);
    });
    supervisor.watch(nullptr);
    outcome = outcome_of(supervisor.ended(), 1, {}, store.get(), supervisor.interrupted());
  }
  for (const auto& line : outcome.lines) say_error(line);
  return outcome.code;
}

bool report_to_launcher(const Place& place, const std::string& text) noexcept {
  if (!place.launched) return false;
  try {
    open_store(place.master_addr, place.master_port, Clock::now() + kStoreTimeout)
        ->set(report_key(place.rank), text);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace braid
