// The launcher: exit codes, kills and interrupts, nothing left behind, two runs at once.
//
// Ranks are shells that write their numbers into a folder, or re-executions of this program.
#include "braid/comm/launch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <fstream>

#include "braid/comm/cores.h"
#include "tests/support/environment.h"
#include "tests/support/errors.h"
#include "tests/support/folders.h"
#include "tests/support/pids.h"
#include "tests/support/processes.h"

namespace braid {
namespace {

namespace fs = std::filesystem;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using test::Clock;
using test::runs;
using testing::HasSubstr;

constexpr auto kEndOfRun = 2s;  // from a kill to the end of everything

/// A folder into which ranks write.
class Folder : public test::TemporaryFolder {
 public:
  /// The file's text, once it is there and ends with a newline.
  std::string wait_for(const std::string& name) const {
    std::string text;
    const auto is_whole = [&] {
      text = test::read_text(*this / name);
      return text.ends_with('\n');
    };
    if (!test::holds_within(20s, is_whole)) throw std::runtime_error("no " + (*this / name));
    return text;
  }
  pid_t wait_for_pid(const std::string& name) const { return std::stoi(wait_for(name)); }
};

bool ends_within(pid_t pid, std::chrono::milliseconds limit) {
  return test::holds_within(limit, [&] { return !runs(pid); });
}

struct Outcome {
  int code;
  std::string said;
};

/// Launches shells that run `script` with $DIR as the folder.
Outcome launch_shells(int num_ranks, const Folder& folder, const std::string& script) {
  test::ScopedEnvironment environment({{"DIR", folder.path().string()}});
  testing::internal::CaptureStderr();
  const int code = launch_ranks(num_ranks, {"-c", script}, "sh");
  return {code, testing::internal::GetCapturedStderr()};
}

TEST(Launch, GivesEachRankItsPlace) {
  Folder folder;
  const auto outcome = launch_shells(
      3, folder,
      R"(echo "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR" >$DIR/$RANK)");
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(outcome.said, "");
  EXPECT_EQ(folder.wait_for("0"), "0/3 0/3 127.0.0.1\n");
  EXPECT_EQ(folder.wait_for("2"), "2/3 2/3 127.0.0.1\n");
}

TEST(Launch, TellsProgramsOfPyTorchTheirThreadsAndInterface) {
  test::ScopedEnvironment unset({{"OMP_NUM_THREADS", ""}, {"GLOO_SOCKET_IFNAME", ""}});
  ::unsetenv("OMP_NUM_THREADS");
  ::unsetenv("GLOO_SOCKET_IFNAME");
  Folder folder;
  test::ScopedEnvironment environment({{"DIR", folder.path().string()}});
  Nodes hosts;
  hosts.interface = "lo";
  const auto seen_by = [&](const std::string& name, int num_ranks) {
    const std::string script =
        "[ $RANK = 0 ] && echo \"${OMP_NUM_THREADS-none} $GLOO_SOCKET_IFNAME\" >$DIR/" + name +
        "; :";
    EXPECT_EQ(launch_ranks(num_ranks, {"-c", script}, "sh", hosts), 0);
    return folder.wait_for(name);
  };
  const auto half = std::max<std::size_t>(1, allowed_cores().size() / 2);
  EXPECT_EQ(seen_by("of_two", 2), std::to_string(half) + " lo\n");
  EXPECT_EQ(seen_by("alone", 1), "none lo\n");
}

TEST(Launch, RefusesWhatCannotRun) {
  EXPECT_THROW(launch_ranks(0, {}), c10::ValueError);
  EXPECT_THROW(launch_ranks(2, {}, "/no/such/program"), c10::ValueError);
  Folder folder;
  const std::string script = (folder.path() / "train.py").string();
  std::ofstream(script) << "print()";
  EXPECT_THAT(test::value_error([&] { launch_ranks(2, {}, script); }),
              HasSubstr("HINT: python " + script));
}

// Every rank and what it has started: `sleep` in the background.
constexpr const char* kSleeper =
    R"(sleep 100 & echo $! >$DIR/child$RANK; echo $$ >$DIR/rank$RANK; )";

TEST(Launch, ExitCodeOfOneRankEndsTheOthers) {
  Folder folder;
  const auto outcome =
      launch_shells(3, folder,
                    std::string(kSleeper) +
                        "until [ -s $DIR/rank0 ] && [ -s $DIR/rank2 ]; do sleep 0.01; done; "
                        "[ $RANK = 1 ] && exit 7; wait");
  EXPECT_EQ(outcome.code, 7);
  EXPECT_THAT(outcome.said,
              HasSubstr("rank 1 (pid " + std::to_string(folder.wait_for_pid("rank1")) +
                        ") exited with code 7"));
  for (const std::string rank : {"0", "1", "2"}) {
    EXPECT_FALSE(runs(folder.wait_for_pid("rank" + rank))) << rank;
    EXPECT_TRUE(ends_within(folder.wait_for_pid("child" + rank), 1s)) << rank;
  }
}

TEST(Launch, KilledRankEndsTheRunAndIsNamed) {
  Folder folder;
  pid_t killed = 0;
  Clock::time_point kill_time;
  std::atomic<bool> has_ended = false;
  // It does not block SIGCHLD, and so may take it from the launcher.
  std::thread killer([&] {
    killed = folder.wait_for_pid("rank1");
    folder.wait_for("rank0");
    kill_time = Clock::now();
    ::kill(killed, SIGKILL);
    test::holds_within(20s, [&] { return has_ended.load(); });
  });
  // SIGTERM is ignored: the survivor has to be killed.
  const auto outcome = launch_shells(
      2, folder, "trap '' TERM; " + std::string(kSleeper) + "while :; do sleep 0.1; done");
  const auto end_time = Clock::now();
  has_ended = true;
  killer.join();
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.said, HasSubstr("rank 1 (pid " + std::to_string(killed) +
                                      ") was killed by signal 9 (Killed)"));
  EXPECT_EQ(std::count(outcome.said.begin(), outcome.said.end(), '\n'), 1) << outcome.said;
  EXPECT_LT(end_time - kill_time, kEndOfRun);
  for (const char* name : {"rank0", "rank1", "child0", "child1"}) {
    EXPECT_TRUE(ends_within(folder.wait_for_pid(name), 500ms)) << name;
  }
}

TEST(Launch, CallersErrorComesBeforeItsConsequences) {
  Folder folder;
  const auto outcome = launch_shells(
      2, folder,
      "if [ $RANK = 0 ]; then until [ -e $DIR/ready ]; do sleep 0.01; done; exit 1; fi; "
      "trap 'exit 2' TERM; sleep 100 & touch $DIR/ready; wait");
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.said, HasSubstr("rank 1"));
}

TEST(Launch, CallersErrorOfOneRankIsSaidAlone) {
  if (const Place place = place_from_environment(); place.launched) {
    const auto store = connect_store(place, 10s);
    if (place.rank == 1) {
      report_to_launcher(place, "data of rank 1 is missing");
      store->set("said", "1");
      ::_exit(2);
    }
    store->wait({"said"});
    report_to_launcher(place, "lost rank 1");
    ::_exit(1);
  }
  testing::internal::CaptureStderr();
  EXPECT_EQ(launch_ranks(2, {"--gtest_filter=Launch.CallersErrorOfOneRankIsSaidAlone"}), 2);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "braid: error: data of rank 1 is missing\n");
}

TEST(Launch, ReportOfSeveralRanksIsSaidOnce) {
  if (const Place place = place_from_environment(); place.launched) {
    const auto store = connect_store(place, 10s);
    const bool told = report_to_launcher(place, "--lr is -1, expected at least 0");
    store->add("told", 1);
    while (store->add("told", 0) < place.world_size) std::this_thread::sleep_for(1ms);
    ::_exit(told ? 2 : 5);
  }
  testing::internal::CaptureStderr();
  const int code = launch_ranks(3, {"--gtest_filter=Launch.ReportOfSeveralRanksIsSaidOnce"});
  EXPECT_EQ(code, 2);
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "braid: error: --lr is -1, expected at least 0\n");
}

TEST(Launch, ReportsOfALossNameTheRank) {
  if (const Place place = place_from_environment(); place.launched) {
    report_to_launcher(place, "lost rank 1 in all_gather");
    if (place.rank == 1) ::raise(SIGKILL);
    ::pause();
  }
  testing::internal::CaptureStderr();
  EXPECT_EQ(launch_ranks(2, {"--gtest_filter=Launch.ReportsOfALossNameTheRank"}), 1);
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              testing::MatchesRegex("braid: error: rank [01]: lost rank 1 in all_gather\n"
                                    "braid: error: rank 1 .pid [0-9]+. was killed by signal 9 "
                                    ".Killed.; the run has ended\n"));
}

TEST(Launch, NoLauncherToReportTo) { EXPECT_FALSE(report_to_launcher(Place{}, "text")); }

/// A launcher as a process of its own: two shells run `script`; the test sets "folder" in its store.
test::Processes::Body launcher_of(const std::string& script) {
  return [script](const Place&, const auto& store) {
    ::setenv("DIR", store->get_to_str("folder").c_str(), 1);
    ::_exit(launch_ranks(2, {"-c", script}, "sh"));
  };
}

TEST(Launch, RanksEndWithTheirLauncher) {
  test::Processes launcher(
      1, launcher_of("trap '' TERM; echo $$ >$DIR/rank$RANK; while :; do sleep 0.1; done"));
  Folder folder;
  launcher.store().set("folder", folder.path().string());
  const pid_t ranks[] = {folder.wait_for_pid("rank0"), folder.wait_for_pid("rank1")};
  launcher.kill(0);
  for (pid_t pid : ranks) EXPECT_TRUE(ends_within(pid, kEndOfRun));
}

TEST(Launch, InterruptIsPassedOn) {
  test::Processes launcher(1, launcher_of("trap 'echo >$DIR/interrupted$RANK; exit 3' TERM; "
                                          "sleep 100 & echo $$ >$DIR/rank$RANK; wait"));
  Folder folder;
  launcher.store().set("folder", folder.path().string());
  const pid_t ranks[] = {folder.wait_for_pid("rank0"), folder.wait_for_pid("rank1")};
  launcher.kill(0, SIGTERM);
  EXPECT_EQ(launcher.wait(0, 5s).exit_code, 3);
  EXPECT_TRUE(fs::exists(folder / "interrupted0"));
  EXPECT_TRUE(fs::exists(folder / "interrupted1"));
  for (pid_t pid : ranks) EXPECT_FALSE(runs(pid));
}

TEST(Launch, SecondInterruptKills) {
  test::Processes launcher(
      1, launcher_of("trap '' INT; echo $$ >$DIR/rank$RANK; while :; do sleep 0.1; done"));
  Folder folder;
  launcher.store().set("folder", folder.path().string());
  const pid_t ranks[] = {folder.wait_for_pid("rank0"), folder.wait_for_pid("rank1")};
  launcher.kill(0, SIGINT);
  std::this_thread::sleep_for(100ms);
  EXPECT_TRUE(runs(ranks[0]));
  launcher.kill(0, SIGINT);
  EXPECT_EQ(launcher.wait(0, kEndOfRun).exit_code, 128 + SIGINT);
  for (pid_t pid : ranks) EXPECT_FALSE(runs(pid));
}

TEST(Launch, TwoRunsNeverMeet) {
  if (const Place place = place_from_environment(); place.launched) {
    const auto store = connect_store(place, 20s);
    const fs::path folder = std::getenv("DIR");
    std::ofstream(folder / std::to_string(::getpid()));
    while (std::distance(fs::directory_iterator(folder), {}) < 6) std::this_thread::sleep_for(2ms);
    store->set("run" + std::to_string(place.rank),
               std::to_string(::getppid()));  // both runs are at this point
    store->add("ranks", 1);
    while (store->add("ranks", 0) < 3) std::this_thread::sleep_for(1ms);
    std::this_thread::sleep_for(50ms);
    bool alone = store->add("ranks", 0) == 3;
    for (const char* key : {"run0", "run1", "run2"})
      alone &= store->get_to_str(key) == std::to_string(::getppid());
    store->add("left", 1);
    while (store->add("left", 0) < 3) std::this_thread::sleep_for(1ms);
    ::_exit(alone ? 0 : 9);
  }
  test::Processes launchers(2, [](const Place&, const auto& store) {
    ::setenv("DIR", store->get_to_str("folder").c_str(), 1);
    ::_exit(launch_ranks(3, {"--gtest_filter=Launch.TwoRunsNeverMeet"}));
  });
  Folder folder;
  launchers.store().set("folder", folder.path().string());
  for (int launcher : {0, 1}) {
    const auto ended = launchers.wait(launcher, 30s);
    EXPECT_EQ(ended.exit_code, 0) << ended.output;
  }
}

}  // namespace
}  // namespace braid
