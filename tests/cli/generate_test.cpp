// `braid generate` as a person uses it: a text from a run's checkpoint, streams that are cut, mistakes.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <memory>

#include "tests/cli/train_program.h"

namespace braid {
namespace {

using std::chrono_literals::operator""s;
using test::Program;
using test::Words;
using testing::HasSubstr;
using testing::StartsWith;

const Words kTwoRanks{"--nproc", "2"};

Words operator+(Words a, const Words& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

class Generation : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new test::TrainFolder;
    folder_->run(
        {"--train-iters", "300", "--max-position-embeddings", "100000", "--seq-length", "64"});
  }
  static void TearDownTestSuite() { delete folder_; }

  static Words generate(const Words& more) {
    return Words{"generate", "--load", "runs/train/checkpoint", "--max-new-tokens", "40"} + more;
  }
  /// What a run that ends well writes.
  static std::string out(const Words& more) {
    Program program(folder_->path(), generate(more));
    EXPECT_EQ(program.wait(), 0) << program.error();
    EXPECT_EQ(program.error(), "");
    return program.out();
  }
  static void expect_refused(const Words& more, const std::string& text) {
    Program program(folder_->path(), generate(more));
    EXPECT_EQ(program.wait(), 2);
    EXPECT_EQ(program.out(), "");
    EXPECT_THAT(program.error(), StartsWith("braid: error: "));
    EXPECT_THAT(program.error(), HasSubstr(text));
    EXPECT_EQ(std::ranges::count(program.error(), '\n'), 1) << program.error();
  }

  static test::TrainFolder* folder_;
};
test::TrainFolder* Generation::folder_ = nullptr;

TEST_F(Generation, ContinuesATextWithWhatTheModelHasLearnt) {
  const std::string text = out({"--prompt", "braid ga"});
  EXPECT_THAT(text, StartsWith("braid gather "));
  EXPECT_EQ(text.size(), 8u + 40 + 1);
  EXPECT_EQ(out(Words{"--prompt", "braid ga"} + kTwoRanks), text);
  EXPECT_EQ(out({"--prompt-tokens", "98,114,97,105,100,32,103,97"}), text);
  EXPECT_EQ(out({"--prompt", "braid ga", "--bf16"}).size(), text.size());
}

TEST_F(Generation, SeveralPromptsAreABatch) {
  folder_->write("prompts.txt", "the\nwhile hi\n");
  const std::string alone = out({"--prompt", "while hi"});
  const std::string texts =
      out(Words{"--prompt", "[a,b]", "--prompt-file", "prompts.txt"} + kTwoRanks);
  EXPECT_THAT(texts, StartsWith("[a,b]"));
  EXPECT_THAT(texts, HasSubstr(alone));
}

TEST_F(Generation, APromptFileThatIsAPipeIsReadOnceOrRefused) {
  std::array<int, 2> ends{};
  const auto prompts_from_pipe = [&](const Words& more) {
    EXPECT_EQ(::pipe(ends.data()), 0);
    EXPECT_EQ(::write(ends[1], "while hi\r\n", 10), 10);
    ::close(ends[1]);
    return std::make_unique<Program>(folder_->path(),
                                     generate(Words{"--prompt-file", "/dev/stdin"} + more),
                                     [&] { ::dup2(ends[0], STDIN_FILENO); });
  };
  const auto alone = prompts_from_pipe({});
  ::close(ends[0]);
  EXPECT_EQ(alone->wait(), 0) << alone->error();
  EXPECT_EQ(alone->out(), out({"--prompt", "while hi"}));
  const auto shared = prompts_from_pipe(kTwoRanks);
  ::close(ends[0]);
  EXPECT_EQ(shared->wait(), 2);
  EXPECT_THAT(shared->error(),
              HasSubstr("--prompt-file /dev/stdin: is not a regular file, so 2 ranks"));
}

TEST_F(Generation, SamplesAreTheSameAtAnyNumberOfRanks) {
  const Words sampled{"--prompt", "sum ", "--temperature", "1.5", "--top-p", "0.95", "--seed", "3"};
  const std::string text = out(sampled);
  EXPECT_EQ(out(sampled + kTwoRanks), text);
  EXPECT_NE(out(sampled + Words{"--seed", "4"}), text);
  EXPECT_NE(out({"--prompt", "sum "}), text);
}

TEST_F(Generation, JsonLines) {
  const std::string lines =
      out(Words{"--json", "--prompt", "tile ", "--prompt", "\xff"} + kTwoRanks);
  ASSERT_EQ(std::ranges::count(lines, '\n'), 2);
  const auto line = nlohmann::json::parse(lines.substr(0, lines.find('\n')));
  EXPECT_EQ(line["prompt"], "tile ");
  EXPECT_EQ(line["prompt_tokens"], nlohmann::json::parse("[116,105,108,101,32]"));
  ASSERT_EQ(line["tokens"].size(), 40u);
  EXPECT_EQ(line["text"].get<std::string>().size(), 40u);
  EXPECT_GT(line["tokens_per_s"], 0);
  EXPECT_GT(line["prefill_s"], 0);
}

/// Without end, for whoever cuts it.
Words endless(const Words& more) {
  return Words{"--prompt", "a", "--max-new-tokens", "99999"} + more;
}

TEST_F(Generation, AReaderThatGoesEndsItQuietly) {
  for (const Words& ranks : {Words{}, kTwoRanks}) {
    std::array<int, 2> ends{};
    ASSERT_EQ(::pipe(ends.data()), 0);
    Program program(folder_->path(), generate(endless(ranks)), [&] {
      ::dup2(ends[1], STDOUT_FILENO);
      ::close(ends[0]);
    });
    ::close(ends[1]);
    std::array<char, 5> read{};
    std::size_t count = 0;
    while (count < read.size()) {
      const auto n = ::read(ends[0], read.data() + count, read.size() - count);
      ASSERT_GT(n, 0);
      count += static_cast<std::size_t>(n);
    }
    ::close(ends[0]);
    EXPECT_EQ(program.wait(10s), 0);
    EXPECT_EQ(program.error(), "");
  }
}

TEST_F(Generation, AFullDiskIsAnError) {
  for (const Words& ranks : {Words{}, kTwoRanks}) {
    const int full = ::open("/dev/full", O_WRONLY | O_CLOEXEC);
    Program program(folder_->path(), generate(endless(ranks)),
                    [&] { ::dup2(full, STDOUT_FILENO); });
    ::close(full);
    EXPECT_EQ(program.wait(10s), 1);
    EXPECT_THAT(program.error(),
                HasSubstr("can't write to standard output: No space left on device\n"));
  }
}

TEST_F(Generation, AnInterruptEndsIt) {
  for (const Words& ranks : {Words{}, kTwoRanks}) {
    Program program(folder_->path(), generate(endless(ranks)));
    ASSERT_TRUE(test::holds_within(30s, [&] { return program.out().size() > 5; }));  // it streams
    program.kill(SIGINT);
    EXPECT_EQ(program.wait(5s), 128 + SIGINT);
    EXPECT_EQ(std::ranges::count(program.error(), '\n'), 0) << program.error();
  }
}

TEST_F(Generation, WarnsOnceOfWhatHasNoEffect) {
  Program program(folder_->path(), generate(Words{"--prompt", "a", "--top-p", "0.5"} + kTwoRanks));
  EXPECT_EQ(program.wait(), 0);
  EXPECT_EQ(program.error(), "braid: warning: --top-p 0.5 has no effect: --temperature is 0\n");
}

TEST_F(Generation, SaysWhatIsWrongInOneLine) {
  expect_refused({}, "no prompt given");
  expect_refused({"--prompt", ""}, "--prompt is ''");
  expect_refused({"--prompt", "a", "--max-new-token", "3"}, "did you mean --max-new-tokens?");
  expect_refused({"--prompt", "a", "--top-p", "0"}, "--top-p is '0', expected a number above 0");
  expect_refused({"--prompt", "a", "--top-p", "1.5"}, "--top-p is 1.5");
  expect_refused({"--prompt", "a", "--top-p", "much"}, "--top-p is 'much', expected a number");
  for (const std::string wrong : {"-1", "inf", "nan"})
    expect_refused({"--prompt", "a", "--temperature=" + wrong},
                   "--temperature is '" + wrong + "', expected a number at least 0");
  for (const std::string wrong : {"-1", "1.5", "18446744073709551616"})
    expect_refused({"--prompt", "a", "--seed=" + wrong},
                   "--seed is '" + wrong + "', expected an integer at least 0");
  expect_refused({"--prompt", "a", "--eos-token-id", "-2"}, "--eos-token-id is '-2'");
  expect_refused({"--prompt", "a", "--eos-token-id", "256"},
                 "--eos-token-id is 256, expected -1 (none) or a token below");
  expect_refused({"--prompt", "a", "--max-new-tokens", "99999999999"}, "--max-new-tokens is '999");
  expect_refused({"--prompt", "a", "--max-new-tokens", "100000"}, "max_position_embeddings 100000");
  expect_refused({"--prompt", "a", "--nproc", "0"}, "--nproc is '0'");
  expect_refused({"--prompt", "a", "--nproc", "5"}, "--tensor-model-parallel-size is 5");
  expect_refused({"--prompt", "a", "--nproc", "2", "--tensor-model-parallel-size", "1"},
                 "--tensor-model-parallel-size is 1, but the number of ranks is 2");
  expect_refused({"--prompt", "a", "--load", "runs/train"}, "HINT: there is runs/train/checkpoint");
  expect_refused({"--prompt", "a", "--tuner-file", "none/t.json"}, "--tuner-file none/t.json: ");
  expect_refused({"--prompt-tokens", "1,256"}, "--prompt-tokens has 256");
}

}  // namespace
}  // namespace braid
