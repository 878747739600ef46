// Ranks as processes: re-executions of the running test, each with mappings of its own; for kills and freezes.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "braid/comm/join.h"
#include "braid/comm/spawn.h"
#include "braid/core/env.h"

namespace braid::test {

/// How a process ended.
struct Ended {
  int exit_code =
      -1;  // 0: `body` returned and no expectation failed; 1: it threw; 2: it threw ValueError
  int signal =
      0;  // that ended it; SIGALRM: it was still running when the wait was over, and was killed
  std::string output;
};

/// Ranks that run `body` from this point of the current test. In a re-execution the constructor never returns: what
/// stands before it in the test runs in every rank too, what stands after it in the test alone. One object a test.
///
///   Processes ranks(2, [](const Place& place, const auto& store) { ...; store->set("ready", "1"); ... });
///   ranks.store().wait({"ready"});
///   ranks.kill(1);
///   EXPECT_EQ(ranks.wait(0, 5s).exit_code, 1);
class Processes {
 public:
  using Body =
      std::function<void(const Place& place, const c10::intrusive_ptr<c10d::Store>& store)>;

  Processes(int num_ranks, const Body& body) {
    if (std::getenv(kMarker) != nullptr) run(body);
    const auto& test = *testing::UnitTest::GetInstance()->current_test_info();
    HostedStore hosted;
    for (int rank = 0; rank < num_ranks; ++rank) {
      auto environment = environment_of_rank(place_on_this_host(rank, num_ranks, hosted.port()));
      std::erase_if(environment,
                    [](const auto& entry) { return entry.first.starts_with("GTEST_"); });
      environment.emplace(kMarker, "1");
      Process process;
      process.output = ::memfd_create("output", MFD_CLOEXEC);
      sigset_t mask;
      ::pthread_sigmask(SIG_SETMASK, nullptr, &mask);
      const auto filter =
          std::string("--gtest_filter=") + test.test_suite_name() + "." + test.name();
      process.pid = spawn("/proc/self/exe", {filter}, environment, mask, process.output);
      processes_.push_back(process);
    }
    store_ = hosted.start();
  }
  /// Kills those that nobody waited for.
  ~Processes() {
    for (std::size_t i = 0; i < processes_.size(); ++i) wait(static_cast<int>(i), {});
  }
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  /// The store of the ranks.
  c10d::Store& store() { return *store_; }
  pid_t pid(int rank) const { return at(rank).pid; }
  void kill(int rank, int signal = SIGKILL) const { ::kill(pid(rank), signal); }
  void freeze(int rank) const { kill(rank, SIGSTOP); }
  void thaw(int rank) const { kill(rank, SIGCONT); }

  /// Waits for the end of one rank; kills it at the time-out.
  Ended wait(int rank, std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
    Process& process = at(rank);
    if (process.pid == 0) return process.ended;
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    int status = 0;
    bool late = false;
    while (::waitpid(process.pid, &status, WNOHANG) == 0) {
      late = std::chrono::steady_clock::now() >= deadline;
      if (late) {
        kill(rank);
        ::waitpid(process.pid, &status, 0);
        break;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    process.pid = 0;
    if (WIFEXITED(status)) process.ended.exit_code = WEXITSTATUS(status);
    if (WIFSIGNALED(status)) process.ended.signal = late ? SIGALRM : WTERMSIG(status);
    process.ended.output.resize(static_cast<std::size_t>(::lseek(process.output, 0, SEEK_END)));
    [[maybe_unused]] const auto size =
        ::pread(process.output, process.ended.output.data(), process.ended.output.size(), 0);
    ::close(process.output);
    return process.ended;
  }

 private:
  static constexpr const char* kMarker = "BRAID_TEST_PROCESS";
  struct Process {
    pid_t pid = 0;  // 0: it has ended and was waited for
    int output = -1;
    Ended ended;
  };

  Process& at(int rank) { return processes_.at(static_cast<std::size_t>(rank)); }
  const Process& at(int rank) const { return processes_.at(static_cast<std::size_t>(rank)); }

  [[noreturn]] static void run(const Body& body) {
    int code = 0;
    try {
      const Place place = place_from_environment();
      body(place, connect_store(place, env().timeout));
      if (testing::Test::HasFailure()) code = 1;
    } catch (const c10::Error& error) {
      std::fprintf(stderr, "%s\n", error.what_without_backtrace());
      code = dynamic_cast<const c10::ValueError*>(&error) != nullptr ? 2 : 1;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      code = 1;
    }
    std::fflush(nullptr);
    ::_exit(code);
  }

  std::vector<Process> processes_;
  c10::intrusive_ptr<c10d::Store> store_;
};

/// Runs `body` in `num_ranks` processes and expects each to succeed; shows the output of those that do not.
inline std::vector<Ended> run_ranks_as_processes(int num_ranks, const Processes::Body& body) {
  Processes ranks(num_ranks, body);
  std::vector<Ended> all;
  for (int rank = 0; rank < num_ranks; ++rank) {
    all.push_back(ranks.wait(rank));
    EXPECT_EQ(all.back().exit_code, 0)
        << "rank " << rank << " ended with signal " << all.back().signal << ":\n"
        << all.back().output;
  }
  return all;
}

}  // namespace braid::test
