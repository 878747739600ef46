// Starts ranks on this host, watches them and ends them together.
#include "braid/comm/launch.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <optional>
#include <utility>

#include "braid/comm/spawn.h"
#include "braid/core/check.h"
#include "braid/core/log.h"

namespace braid {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kGraceAfterLoss{500};
constexpr std::chrono::milliseconds kGraceAfterInterrupt{5000};
constexpr int kCallersError = 2;                          // a rank's exit code
constexpr std::chrono::milliseconds kStoreTimeout{1000};  // of a report: the store is on this host

std::string report_key(int rank) { return fmt::format("braid/report/{}", rank); }

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

  /// The next signal, or one with number 0 at the deadline.
  siginfo_t next(std::optional<Clock::time_point> deadline) const {
    siginfo_t info{};
    if (!deadline) {
      if (sigwaitinfo(&set_, &info) < 0) info.si_signo = 0;
      return info;
    }
    const auto left =
        std::max(std::chrono::nanoseconds(*deadline - Clock::now()), std::chrono::nanoseconds(0));
    const timespec wait{left.count() / 1'000'000'000, left.count() % 1'000'000'000};
    if (sigtimedwait(&set_, &info, &wait) < 0) info.si_signo = 0;
    return info;
  }

 private:
  sigset_t set_{}, old_{};
  struct sigaction child_action_ {};
};

struct Rank {
  pid_t pid = 0;
  bool running = true;
  int status = 0;       // as waitpid gives it
  int ending_with = 0;  // the last signal that we sent
  int exit_code() const { return WIFEXITED(status) ? WEXITSTATUS(status) : -1; }
  bool killed_by_us() const {
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && ending_with == SIGKILL;
  }
  bool killed_by_others() const {
    return WIFSIGNALED(status) && WTERMSIG(status) != ending_with &&
           !(ending_with == SIGKILL && WTERMSIG(status) == SIGTERM);
  }
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
  explicit Supervisor(int num_ranks) : ranks_(static_cast<std::size_t>(num_ranks)) {}
  /// No rank outlives it.
  ~Supervisor() {
    send_all(SIGKILL);
    for (auto& rank : ranks_) {
      if (rank.pid > 0 && rank.running) waitpid(rank.pid, nullptr, 0);
    }
  }
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  void start_all(const std::string& program, const std::vector<std::string>& arguments, int port) {
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      auto environment =
          environment_of_rank(static_cast<int>(i), static_cast<int>(ranks_.size()), port);
      environment.insert_or_assign("BRAID_LAUNCHED", program == kThisProgram ? "self" : "1");
      ranks_[i].pid = spawn(program, arguments, environment, signals_.mask_before());
    }
  }

  void watch() {
    while (
        std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.running; })) {
      const siginfo_t info = signals_.next(deadline_);
      if (info.si_signo == SIGINT || info.si_signo == SIGTERM) interrupt(info.si_signo);
      if (info.si_signo == SIGTSTP) pause();
      reap();
      if (deadline_ && Clock::now() >= *deadline_) {
        send_all(SIGKILL);
        deadline_.reset();
      }
    }
  }

  /// Says what went wrong, once; returns the launcher's exit code.
  int conclude(c10d::Store& store) const {
    const auto first = [&](auto is_cause) {
      const auto i = std::find_if(ended_.begin(), ended_.end(),
                                  [&](auto rank) { return is_cause(ranks_[rank]); });
      return i == ended_.end() ? std::optional<std::size_t>() : *i;
    };
    const auto name = [&](std::size_t i) {
      return fmt::format("rank {} (pid {})", i, ranks_[i].pid);
    };
    const auto lost = [](const Rank& rank) {
      return rank.killed_by_others() && WTERMSIG(rank.status) != SIGPIPE;
    };
    if (!first(lost) && !ended_.empty() && ranks_[ended_[0]].killed_by_others())
      return 128 + SIGPIPE;  // nobody reads its output any more: an end, and no error
    if (const auto i = first(lost); i && interrupted_ == 0) {
      say_reports(store);
      const int signal = WTERMSIG(ranks_[*i].status);
      say("{} was killed by signal {} ({}); the run has ended", name(*i), signal,
          strsignal(signal));
      return 1;
    }
    if (const auto i = first([](const Rank& rank) { return rank.exit_code() == kCallersError; })) {
      if (const auto text = report_of(store, *i); !text.empty()) {
        say("{}", text);
      } else {
        say("{} exited with code {}; the run has ended", name(*i), kCallersError);
      }
      return kCallersError;
    }
    if (const auto i = first([](const Rank& rank) { return rank.exit_code() > 0; })) {
      say_reports(store);
      for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
        if (ranks_[rank].killed_by_us() && report_of(store, rank).empty())
          say("{} did not react (it was frozen, or hangs) and was killed", name(rank));
      }
      say("{} exited with code {}; the run has ended", name(*i), ranks_[*i].exit_code());
      return ranks_[*i].exit_code();
    }
    const bool all_succeeded = std::all_of(ranks_.begin(), ranks_.end(),
                                           [](const Rank& rank) { return rank.status == 0; });
    return interrupted_ == 0 || all_succeeded ? 0 : 128 + interrupted_;
  }

 private:
  void interrupt(int signal) {
    if (std::exchange(interrupted_, signal) != 0) return send_all(SIGKILL);
    send_all(signal);
    deadline_ = Clock::now() + kGraceAfterInterrupt;
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
      if (rank.status == 0 || interrupted_ != 0 || std::exchange(losing_, true)) continue;
      send_all(SIGTERM);
      deadline_ = Clock::now() + kGraceAfterLoss;
    }
  }

  void send_all(int signal) {
    for (auto& rank : ranks_) {
      if (rank.pid <= 0 || !rank.running) continue;
      rank.ending_with = signal;
      if (kill(-rank.pid, signal) != 0) kill(rank.pid, signal);  // before its setpgid
    }
  }

  template <class... Parts>
  static void say(fmt::format_string<Parts...> text, Parts&&... parts) {
    say_error(fmt::format(text, std::forward<Parts>(parts)...));
  }

  /// What the rank left with report_to_launcher; empty if nothing.
  static std::string report_of(c10d::Store& store, std::size_t i) {
    const auto key = report_key(static_cast<int>(i));
    return store.check({key}) ? store.get_to_str(key) : std::string();
  }

  /// Says each text that a rank left, once.
  void say_reports(c10d::Store& store) const {
    std::vector<std::string> said{""};
    for (std::size_t i : ended_) {
      const auto text = report_of(store, i);
      if (std::find(said.begin(), said.end(), text) != said.end()) continue;
      said.push_back(text);
      say("rank {}: {}", i, text);
    }
  }

  Signals signals_;
  std::vector<Rank> ranks_;
  std::vector<std::size_t> ended_;  // in this order
  std::optional<Clock::time_point> deadline_;
  int interrupted_ = 0;  // the first signal that was passed on
  bool losing_ = false;
};

}  // namespace

int launch_ranks(int num_ranks, const std::vector<std::string>& arguments,
                 const std::string& program) {
  BRAID_CHECK(num_ranks >= 1 && num_ranks <= kMostRanks, "the number of ranks is ", num_ranks,
              ", expected 1 to ", kMostRanks);
  allow_open_files();
  std::fflush(nullptr);
  Supervisor supervisor(num_ranks);
  HostedStore hosted;
  supervisor.start_all(program, arguments, hosted.port());
  const auto store = hosted.start();  // while the ranks load
  supervisor.watch();
  return supervisor.conclude(*store);
}

bool report_to_launcher(const Place& place, const std::string& text) noexcept {
  if (!place.launched) return false;
  try {
    connect_store(place, kStoreTimeout)->set(report_key(place.rank), text);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace braid
