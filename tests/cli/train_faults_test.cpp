// Runs of `braid train` that are killed, frozen, interrupted, out of disk or out of numbers: how
// they end, what they say, what they leave.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/cli/train_program.h"

namespace braid {
namespace {

namespace fs = std::filesystem;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using test::Clock;
using test::Program;
using test::runs;
using test::Words;
using testing::HasSubstr;
using testing::MatchesRegex;

constexpr auto kEndOfRun = 2s;  // from a kill to the end of everything

const Words kFused{"--nproc",
                   "2",
                   "--tensor-model-parallel-size",
                   "2",
                   "--sequence-parallel",
                   "--use-coc",
                   "--coc-fused-kernel"};

/// Its processes' temporary files go to a folder of the test.
class TrainFaults : public testing::Test {
 protected:
  TrainFaults() { fs::create_directories(folder_ / "tmp"); }

  /// A run without end.
  Program start(const Words& more, const char* timeout_s = "60") const {
    Words words = test::TrainFolder::train(more);
    const Words endless{"--train-iters", "1000000", "--eval-iters", "0"};
    words.insert(words.end(), endless.begin(), endless.end());
    const std::string temporary = folder_ / "tmp";
    return Program(folder_.path(), words, [=] {
      ::setenv("TMPDIR", temporary.c_str(), 1);
      ::setenv("BRAID_TIMEOUT_S", timeout_s, 1);
    });
  }
  void wait_for_iterations(std::size_t count, const Program& program) const {
    ASSERT_TRUE(test::holds_within(60s, [&] { return folder_.metrics().size() >= count; }))
        << program.error();
  }
  /// Neither a process nor a file that only a running run has.
  void expect_nothing_left(const std::vector<pid_t>& ranks) const {
    for (const pid_t pid : ranks)
      EXPECT_TRUE(test::holds_within(500ms, [&] { return !runs(pid); })) << pid;
    for (const auto& entry : fs::directory_iterator("/dev/shm"))
      EXPECT_THAT(entry.path().filename(), testing::Not(HasSubstr("braid")));
    EXPECT_TRUE(fs::is_empty(folder_ / "tmp"));
    for (const auto& entry : fs::recursive_directory_iterator(folder_ / "runs"))
      EXPECT_THAT(entry.path().filename(), testing::Not(HasSubstr("partial")));
  }
  /// The checkpoint can be loaded; gives its iteration.
  std::int64_t expect_loadable(const std::string& checkpoint) const {
    const std::int64_t iteration =
        std::stoll(test::read_text(folder_ / (checkpoint + "/latest_checkpointed_iteration.txt")));
    folder_.run({"--load", checkpoint, "--train-iters", std::to_string(iteration + 1),
                 "--output-dir", "after"});
    EXPECT_EQ(folder_.metrics("after").size(), 1u);
    fs::remove_all(folder_ / "after");
    return iteration;
  }
  test::TrainFolder folder_;
};

TEST_F(TrainFaults, KilledRankEndsTheRun) {
  const Words four{"--nproc", "4",        "--tensor-model-parallel-size", "2", "--micro-batch-size",
                   "1",       "--use-coc"};
  for (const Words& flags : {kFused, four}) {
    fs::remove_all(folder_ / "runs");
    Program program = start(flags);
    const auto ranks = program.ranks(flags == four ? 4 : 2);
    wait_for_iterations(3, program);
    ::kill(ranks[1], SIGKILL);
    EXPECT_EQ(program.wait(kEndOfRun), 1);
    EXPECT_THAT(program.error(),
                HasSubstr("rank 1 (pid " + std::to_string(ranks[1]) + ") was killed by signal 9"));
    expect_nothing_left(ranks);
  }
}

// At moments that differ, most of them within a save.
TEST_F(TrainFaults, KilledWhileSaving) {
  std::int64_t last = 0;
  for (int kill = 0; kill < 4; ++kill) {
    Words words = kFused;
    words.insert(words.end(), {"--save-interval", "1"});
    if (last > 0) words.insert(words.end(), {"--load", "runs/train/checkpoint"});
    Program program = start(words);
    const auto ranks = program.ranks(2);
    wait_for_iterations(static_cast<std::size_t>(last) + 3, program);
    ASSERT_TRUE(test::holds_within(
        20s, [&] { return fs::exists(folder_ / "runs/train/checkpoint/.partial"); }));
    std::this_thread::sleep_for(kill * 2ms);
    ::kill(ranks[kill % 2], SIGKILL);
    EXPECT_EQ(program.wait(kEndOfRun), 1);
    expect_nothing_left(ranks);
    const std::int64_t iteration = expect_loadable("runs/train/checkpoint");
    EXPECT_GT(iteration, last);
    last = iteration;
  }
}

TEST_F(TrainFaults, RanksEndWithTheirLauncher) {
  Program program = start(kFused);
  const auto ranks = program.ranks(2);
  wait_for_iterations(2, program);
  program.kill(SIGKILL);
  for (const pid_t pid : ranks)
    EXPECT_TRUE(test::holds_within(kEndOfRun, [&] { return !runs(pid); })) << pid;
  expect_nothing_left(ranks);
}

TEST_F(TrainFaults, FrozenRankIsNamed) {
  Words words = kFused;
  words.insert(words.end(), {"--distributed-timeout-seconds", "3"});
  Program program = start(words);
  const auto ranks = program.ranks(2);
  wait_for_iterations(2, program);
  ::kill(ranks[1], SIGSTOP);
  EXPECT_EQ(program.wait(3s + kEndOfRun), 1);
  EXPECT_THAT(program.error(), HasSubstr("rank 0: "));  // what it was waiting in
  EXPECT_THAT(program.error(),
              HasSubstr("rank 1 (pid " + std::to_string(ranks[1]) + ") did not react"));
  expect_nothing_left(ranks);
}

TEST_F(TrainFaults, InterruptsEndIt) {
  for (const int signal : {SIGINT, SIGTERM}) {
    fs::remove_all(folder_ / "runs");
    Words words = kFused;
    words.insert(words.end(), {"--save-interval", "1"});
    Program program = start(words);
    const auto ranks = program.ranks(2);
    wait_for_iterations(3, program);
    program.kill(signal);
    EXPECT_EQ(program.wait(kEndOfRun), 128 + signal);
    EXPECT_EQ(program.error(), "");
    expect_nothing_left(ranks);
    EXPECT_GE(expect_loadable("runs/train/checkpoint"), 1);
  }
}

TEST_F(TrainFaults, NoNumbersEndIt) {
  for (const Words& flags : {Words{}, kFused}) {
    fs::remove_all(folder_ / "runs");
    Words words = flags;
    words.insert(words.end(), {"--save-interval", "1", "--lr", "1e38", "--clip-grad", "0"});
    Program program(folder_.path(), test::TrainFolder::train(words));
    EXPECT_EQ(program.wait(), 1);
    EXPECT_THAT(program.error(), HasSubstr("iteration 2: the loss is nan"));
    EXPECT_THAT(program.error(), HasSubstr("--lr"));
    EXPECT_EQ(folder_.metrics().size(), 1u);
    EXPECT_EQ(test::read_text(folder_ / "runs/train/checkpoint/latest_checkpointed_iteration.txt"),
              "1\n");
    expect_nothing_left({});
  }
}

// On a file system of 2 MB in which one checkpoint has room, and not two.
TEST_F(TrainFaults, FullDiskLeavesTheLastCheckpoint) {
  fs::create_directories(folder_ / "disk");
  const test::SmallFileSystem disk(folder_ / "disk", "2m");
  if (!disk.is_mounted()) GTEST_SKIP() << "may not mount";
  Words words = kFused;
  words.insert(words.end(), {"--save", "disk/checkpoint", "--save-interval", "3"});
  {
    Program program(folder_.path(), test::TrainFolder::train(words));
    EXPECT_EQ(program.wait(), 1);
    EXPECT_THAT(program.error(), HasSubstr("disk/checkpoint/"));
    EXPECT_THAT(program.error(), HasSubstr("No space left on device"));
  }
  EXPECT_THAT(test::names_in(folder_ / "disk/checkpoint"),
              testing::ElementsAre("config.json", "iter_0000003", "latest",
                                   "latest_checkpointed_iteration.txt", "model.safetensors"));
  EXPECT_EQ(expect_loadable("disk/checkpoint"), 3);
  // With room again it goes on.
  ASSERT_TRUE(disk.resize("20m"));
  words.insert(words.end(), {"--load", "disk/checkpoint"});
  folder_.run(words);
  EXPECT_EQ(expect_loadable("disk/checkpoint"), 10);
  EXPECT_EQ(folder_.metrics().size(), 10u);
}

TEST_F(TrainFaults, AReaderThatGoesEndsNothing) {
  Words words = test::TrainFolder::train(kFused);
  std::string line = std::string(BRAID_PROGRAM) + " --log-interval 1 | head -1";
  std::string arguments;
  for (const auto& word : words) arguments += " " + word;
  line.insert(line.find(" --log"), arguments);
  line = "cd " + folder_.path().string() + "; set -o pipefail; " + line;
  const std::vector<std::string> shell{"bash", "-c", line};
  std::vector<char*> argv;
  for (const auto& word : shell) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  const pid_t pid = ::fork();
  if (pid == 0) ::execvp(argv[0], argv.data());
  int status = -1;
  ::waitpid(pid, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(folder_.metrics().size(), 10u);
}

TEST_F(TrainFaults, ATraceThatCantBeWrittenEndsNothing) {
  Words words = kFused;
  words.insert(words.end(), {"--trace", "/dev/full"});
  Program program(folder_.path(), test::TrainFolder::train(words));
  EXPECT_EQ(program.wait(), 0) << program.error();
  EXPECT_THAT(program.out(), HasSubstr("warning: can't write the trace /dev/full: No space left"));
  EXPECT_TRUE(fs::exists("/dev/full"));
  // A folder that is not there yet is made.
  folder_.run({"--trace", "new/folder/trace.json"});
  const auto trace = nlohmann::json::parse(test::read_text(folder_ / "new/folder/trace.json"));
  EXPECT_GT(trace["traceEvents"].size(), 100u);
}

// At once: two runs with other seeds, each as when it is alone.
TEST_F(TrainFaults, TwoRunsDoNotMeet) {
  const auto words_of = [](const std::string& seed, const std::string& output_dir) {
    Words words = kFused;
    words.insert(words.end(), {"--seed", seed, "--output-dir", output_dir});
    return test::TrainFolder::train(words);
  };
  const auto losses = [&](const std::string& output_dir) {
    std::vector<double> found;
    for (const auto& line : folder_.metrics(output_dir)) found.push_back(line["loss"]);
    return found;
  };
  for (const std::string seed : {"1", "2"})
    EXPECT_EQ(Program(folder_.path(), words_of(seed, "alone" + seed)).wait(), 0);
  Program one(folder_.path(), words_of("1", "beside1"));
  Program two(folder_.path(), words_of("2", "beside2"));
  EXPECT_EQ(one.wait(), 0) << one.error();
  EXPECT_EQ(two.wait(), 0) << two.error();
  EXPECT_NE(losses("alone1"), losses("alone2"));
  EXPECT_EQ(losses("alone1"), losses("beside1"));
  EXPECT_EQ(losses("alone2"), losses("beside2"));
}

}  // namespace
}  // namespace braid
