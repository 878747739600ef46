// Standard streams that are full, closed or without a reader, as `braid` meets them.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "tests/cli/train_program.h"

namespace braid {
namespace {

using test::Program;
using test::Words;
using testing::HasSubstr;

class Output : public testing::Test {
 protected:
  /// Commands whose output is what they are for.
  static std::vector<Words> commands() {
    return {{"--help"},
            {"--version"},
            {"train", "--help"},
            {"generate", "--help"},
            {"bench", "int8", "--n", "8", "--k", "8", "--rounds", "1"},
            {"bench", "ops", "--op", "matmul_all_reduce", "--m", "8", "--n", "8", "--k", "8",
             "--rounds", "1"},
            {"bench", "step", "--num-layers", "1", "--hidden-size", "32", "--seq-length", "32",
             "--train-iters", "1", "--micro-batch-size", "1", "--num-attention-heads", "2"},
            {"tune", "--tuner-file", "tuner.json", "--nproc", "2", "--tensor-model-parallel-size",
             "2", "--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2",
             "--seq-length", "32", "--micro-batch-size", "1"}};
  }
  test::TrainFolder folder_;
};

std::string shown(const Words& words) {
  std::string text;
  for (const auto& word : words) text += word + " ";
  return text;
}

TEST_F(Output, ThatCantBeWrittenIsAnError) {
  for (const Words& words : commands()) {
    SCOPED_TRACE(shown(words));
    const int full = ::open("/dev/full", O_WRONLY | O_CLOEXEC);
    Program onto_full(folder_.path(), words, [&] { ::dup2(full, STDOUT_FILENO); });
    ::close(full);
    EXPECT_EQ(onto_full.wait(), 1);
    EXPECT_THAT(onto_full.error(),
                HasSubstr("can't write to standard output: No space left on device\n"));
    Program closed(folder_.path(), words, [] { ::close(STDOUT_FILENO); });
    EXPECT_EQ(closed.wait(), 1);
    EXPECT_THAT(closed.error(), HasSubstr("can't write to standard output: Bad file descriptor\n"));
  }
}

TEST_F(Output, ThatNobodyReadsEndsTheProgramQuietly) {
  for (const Words& words : commands()) {
    SCOPED_TRACE(shown(words));
    std::array<int, 2> ends{};
    ASSERT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
    ::close(ends[0]);
    Program program(folder_.path(), words, [&] { ::dup2(ends[1], STDOUT_FILENO); });
    ::close(ends[1]);
    EXPECT_EQ(program.wait(), 128 + SIGPIPE);
    EXPECT_THAT(program.error(), testing::Not(HasSubstr("error")));
  }
}

TEST_F(Output, ErrorsThatCantBeSaidKeepTheirExitCodes) {
  for (const auto& [words, code] :
       {std::pair(Words{"launch", "--nproc", "two"}, 2),
        {Words{"launch", "--nproc", "2", "--", "sh", "-c", "exit 7"}, 7},
        {Words{"launch", "--nproc", "2", "--", BRAID_PROGRAM, "launch", "--nproc", "0"}, 2}}) {
    SCOPED_TRACE(shown(words));
    const int full = ::open("/dev/full", O_WRONLY | O_CLOEXEC);
    Program onto_full(folder_.path(), words, [&] { ::dup2(full, STDERR_FILENO); });
    ::close(full);
    EXPECT_EQ(onto_full.wait(), code);
    Program closed(folder_.path(), words, [] { ::close(STDERR_FILENO); });
    EXPECT_EQ(closed.wait(), code);
  }
}

// Else the first sockets and files would be what the program writes its lines into.
TEST_F(Output, NoFileTakesThePlaceOfAStreamThatIsClosed) {
  Program program(folder_.path(),
                  test::TrainFolder::train({"--nproc", "2", "--tensor-model-parallel-size", "2"}),
                  [] {
                    for (const int fd : {0, 1, 2}) ::close(fd);
                  });
  EXPECT_EQ(program.wait(), 0);
  EXPECT_EQ(folder_.metrics().size(), 10u);
  Program shows(folder_.path(),
                {"launch", "--nproc", "1", "--", "sh", "-c", "readlink /proc/self/fd/0 >&2"},
                [] { ::close(0); });
  EXPECT_EQ(shows.wait(), 0);
  EXPECT_EQ(shows.error(), "/dev/null\n");
}

}  // namespace
}  // namespace braid
