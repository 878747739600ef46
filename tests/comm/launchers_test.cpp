// Runs over several hosts, here launchers of one host that are told so: how they meet, fail and end together.
#include "braid/comm/launchers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "braid/comm/launch.h"
#include "tests/support/environment.h"
#include "tests/support/folders.h"
#include "tests/support/pids.h"
#include "tests/support/processes.h"

namespace braid {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using testing::HasSubstr;

constexpr auto kEndOfRun = 3s;  // from a loss to the end of everything, on all hosts

/// Launchers of hosts; each starts `num_ranks` shells that run the script with $DIR as the folder. One object a
/// test, as of test::Processes.
class TestHosts {
 public:
  /// change   what a launcher is told other than the others
  TestHosts(int num_hosts, int num_ranks, const std::string& script,
            const std::function<void(int host, Nodes& hosts, int& num_ranks)>& change = {})
      : launchers_(num_hosts, [=](const Place& place, const auto& store) {
          ::setenv("DIR", store->get_to_str("folder").c_str(), 1);
          Nodes hosts;
          hosts.num = num_hosts;
          hosts.rank = place.rank;
          hosts.master_addr = "127.0.0.1";
          hosts.master_port = std::stoi(store->get_to_str("port"));
          int ranks = num_ranks;
          if (change) change(place.rank, hosts, ranks);
          ::_exit(launch_ranks(ranks, {"-c", script}, "sh", hosts));
        }) {
    launchers_.store().set("folder", folder_.path().string());
    launchers_.store().set("port", std::to_string(port_));
  }

  int port() const { return port_; }
  void kill(int host, int signal = SIGKILL) const { launchers_.kill(host, signal); }
  /// Its output is that of the launcher, without the test framework's.
  test::Ended wait(int host, std::chrono::milliseconds limit = 20s) {
    test::Ended ended = launchers_.wait(host, limit);
    const auto begin = ended.output.find('\n', ended.output.find("[ RUN "));
    ended.output.erase(0, begin == std::string::npos ? 0 : begin + 1);
    return ended;
  }
  /// What a rank has written, once it ends with a newline.
  std::string wait_for(const std::string& name) const {
    std::string text;
    EXPECT_TRUE(test::holds_within(20s, [&] {
      text = test::read_text(folder_ / name);
      return text.ends_with('\n');
    })) << name;
    return text;
  }
  pid_t wait_for_pid(const std::string& name) const { return std::stoi(wait_for(name)); }
  bool has(const std::string& name) const { return std::filesystem::exists(folder_ / name); }

 private:
  test::ScopedEnvironment environment_{{{"BRAID_TIMEOUT_S", "2"}}};
  test::Processes launchers_;
  test::TemporaryFolder folder_;  // of the test alone, as it comes after the processes
  int port_ = HostedStore().port();
};

// Each rank writes its number, and sleeps.
constexpr const char* kSleeper = "echo $$ >$DIR/$RANK; while :; do sleep 0.1; done";

TEST(Launchers, GiveEachRankItsPlace) {
  TestHosts hosts(3, 2,
                  R"(echo "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR )"
                  R"($MASTER_PORT $BRAID_INTERFACE $TORCHELASTIC_RUN_ID" >$DIR/$RANK)",
                  [](int, Nodes& told, int&) { told.interface = "lo"; });
  for (int host : {0, 1, 2}) {
    const auto ended = hosts.wait(host);
    EXPECT_EQ(ended.exit_code, 0) << ended.output;
    EXPECT_EQ(ended.output, "");
  }
  const auto same = " 127.0.0.1 " + std::to_string(hosts.port()) + " lo braid launch, pid ";
  EXPECT_THAT(hosts.wait_for("0"), testing::StartsWith("0/6 0/2" + same));
  EXPECT_THAT(hosts.wait_for("3"), testing::StartsWith("3/6 1/2" + same));
  EXPECT_THAT(hosts.wait_for("5"), testing::StartsWith("5/6 1/2" + same));
  EXPECT_EQ(hosts.wait_for("0").substr(8), hosts.wait_for("5").substr(8));
}

/// Rank 3, on host 1 of 3, ends so; all launchers say it and return the code.
void expect_all_say(const std::string& end, const std::string& said, int code) {
  TestHosts hosts(
      3, 2,
      "[ $RANK = 3 ] && { until [ -s $DIR/0 ]; do sleep 0.01; done; " + end + "; }; " + kSleeper);
  for (int host : {0, 1, 2}) {
    const auto ended = hosts.wait(host);
    EXPECT_EQ(ended.exit_code, code) << ended.output;
    EXPECT_THAT(ended.output, testing::MatchesRegex("braid: error: rank 3 .pid [0-9]+ on host 1. " +
                                                    said + "; the run has ended\n"));
  }
  EXPECT_FALSE(test::runs(hosts.wait_for_pid("0")));
}
TEST(Launchers, AllSayWhichRankFailed) { expect_all_say("exit 7", "exited with code 7", 7); }
TEST(Launchers, AllSayWhichRankWasKilled) {
  expect_all_say("kill -9 $$", "was killed by signal 9 .Killed.", 1);
}

TEST(Launchers, AHostThatIsDoneWaitsForTheOthers) {
  TestHosts hosts(2, 1, "[ $RANK = 0 ] && exit 0; sleep 0.5; exit 4");
  for (int host : {0, 1}) {
    const auto ended = hosts.wait(host);
    EXPECT_EQ(ended.exit_code, 4) << ended.output;
    EXPECT_THAT(ended.output, HasSubstr("rank 1"));
  }
}

void expect_end_without(int killed) {
  TestHosts hosts(3, 1, std::string("trap '' TERM; ") + kSleeper);
  std::vector<pid_t> ranks;
  for (const char* rank : {"0", "1", "2"}) ranks.push_back(hosts.wait_for_pid(rank));
  hosts.kill(killed);
  for (int host : {0, 1, 2}) {
    if (host == killed) continue;
    const auto ended = hosts.wait(host, kEndOfRun);
    EXPECT_EQ(ended.exit_code, 1) << ended.signal;
    EXPECT_EQ(ended.output, "braid: error: lost host " + std::to_string(killed) +
                                " (127.0.0.1); the run has ended\n");
  }
  for (const pid_t pid : ranks)
    EXPECT_TRUE(test::holds_within(500ms, [&] { return !test::runs(pid); })) << pid;
}
TEST(Launchers, EndWhenHostZerosIsKilled) { expect_end_without(0); }
TEST(Launchers, EndWhenAnotherIsKilled) { expect_end_without(1); }

void expect_end_without_frozen(int frozen) {
  TestHosts hosts(2, 1, "echo $$ >$DIR/$RANK; sleep 1");  // the ranks themselves end well
  for (const char* rank : {"0", "1"}) hosts.wait_for_pid(rank);
  hosts.kill(frozen, SIGSTOP);
  const auto ended = hosts.wait(1 - frozen, 2s + kEndOfRun);
  EXPECT_EQ(ended.exit_code, 1) << ended.signal;
  EXPECT_THAT(ended.output, HasSubstr("lost host " + std::to_string(frozen)));
  hosts.kill(frozen);
  (void)hosts.wait(frozen);
}
TEST(Launchers, EndWhenHostZerosIsFrozen) { expect_end_without_frozen(0); }
TEST(Launchers, EndWhenAnotherIsFrozen) { expect_end_without_frozen(1); }

void expect_end_by_interrupt(int interrupted) {
  TestHosts hosts(
      2, 1,
      "trap 'echo >$DIR/interrupted$RANK; exit 3' TERM; sleep 100 & echo $$ >$DIR/$RANK; "
      "wait");
  for (const char* rank : {"0", "1"}) hosts.wait_for_pid(rank);
  hosts.kill(interrupted, SIGTERM);
  for (int host : {0, 1}) EXPECT_EQ(hosts.wait(host, kEndOfRun).exit_code, 3);
  for (const char* rank : {"0", "1"}) hosts.wait_for(std::string("interrupted") + rank);
}
TEST(Launchers, InterruptOfHostZeroEndsAll) { expect_end_by_interrupt(0); }
TEST(Launchers, InterruptOfAnotherEndsAll) { expect_end_by_interrupt(1); }

constexpr const char* kStarted = "echo >$DIR/started";

/// Every launcher ends with this code and text, and none starts a rank.
void expect_refused(TestHosts& hosts, int num_hosts, int code, const std::string& text) {
  for (int host = 0; host < num_hosts; ++host) {
    const auto ended = hosts.wait(host, 10s);
    EXPECT_EQ(ended.exit_code, code) << "host " << host;
    EXPECT_EQ(ended.output, text + "\n") << "host " << host;
  }
  EXPECT_FALSE(hosts.has("started"));
}

TEST(Launchers, AreToldTheSameNumberOfRanks) {
  TestHosts hosts(3, 1, kStarted, [](int host, Nodes&, int& num_ranks) {
    if (host != 1) return;
    std::this_thread::sleep_for(1s);  // host 2 has come
    num_ranks = 4;
  });
  expect_refused(hosts, 3, 2, "--nproc of host 0 is 1, of host 1 (127.0.0.1) 4");
}

TEST(Launchers, AreToldTheSameNumberOfHosts) {
  TestHosts hosts(2, 1, kStarted, [](int host, Nodes& told, int&) {
    if (host == 1) told.num = 3, told.rank = 2;
  });
  expect_refused(hosts, 2, 2, "--nnodes of host 0 is 2, of host 2 (127.0.0.1) 3");
}

TEST(Launchers, NameTheHostsThatDoNotCome) {
  TestHosts hosts(2, 1, kStarted, [](int, Nodes& told, int&) { told.num = 4; });
  expect_refused(hosts, 2, 1,
                 "hosts 2, 3 of 4 (--node-rank) did not come to 127.0.0.1:" +
                     std::to_string(hosts.port()) + " within 2 s");
}

TEST(Launchers, AHostMayComeAgain) {
  TestHosts hosts(4, 1, "echo >$DIR/$RANK", [](int host, Nodes& told, int&) {
    told.num = 3;
    if (host == 1 || host == 2) std::this_thread::sleep_for(1200ms);
    if (host != 3) return;
    told.rank = 1;  // in host 1's place, and gone before that comes
    std::thread([] {
      std::this_thread::sleep_for(700ms);
      ::_exit(0);
    }).detach();
  });
  for (int host : {0, 1, 2, 3}) {
    const auto ended = hosts.wait(host);
    EXPECT_EQ(ended.exit_code, 0) << host << ": " << ended.output;
  }
  for (const char* rank : {"0", "1", "2"}) hosts.wait_for(rank);
}

TEST(Launchers, ASecondHostOfTheSameNumberGoesAlone) {
  TestHosts hosts(3, 1, "echo >$DIR/$RANK", [](int host, Nodes& told, int&) {
    told.num = 2;
    if (host == 1) std::this_thread::sleep_for(1s);
    if (host == 2) told.rank = 1, std::this_thread::sleep_for(300ms);
    if (host == 0) std::this_thread::sleep_for(1500ms);
  });
  // One of them has come first; the run is of two hosts.
  const auto one = hosts.wait(1), two = hosts.wait(2);
  EXPECT_EQ(hosts.wait(0).exit_code, 0);
  const auto& refused = one.exit_code == 0 ? two : one;
  EXPECT_EQ(one.exit_code + two.exit_code, refused.exit_code);
  EXPECT_THAT(refused.output, testing::AnyOf(HasSubstr("--node-rank 1 has come already"),
                                             HasSubstr("which has begun with all its hosts"),
                                             HasSubstr("nothing listens there")));
}

TEST(Launchers, HostZeroIsAtTheMastersAddress) {
  TestHosts hosts(1, 1, kStarted,
                  [](int, Nodes& told, int&) { told.master_addr = "no-such-host.invalid"; });
  const auto ended = hosts.wait(0, 10s);
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_THAT(ended.output,
              testing::StartsWith("--master-addr no-such-host.invalid does not lead to this host"));
}

TEST(Launchers, NameAPortThatIsTaken) {
  TestHosts hosts(1, 1, kStarted, [](int, Nodes& told, int&) {
    static const auto other = listen_tcp(told.master_port, Listening::everywhere);
  });
  expect_refused(hosts, 1, 1,
                 "the run's store can't be hosted: can't listen on port " +
                     std::to_string(hosts.port()) +
                     ": Address already in use; there is another program. HINT: another port");
}

}  // namespace
}  // namespace braid
