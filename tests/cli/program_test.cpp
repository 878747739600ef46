// The program `braid` as a person uses it: help, one clear line for a wrong command line, exit codes, launch.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

namespace braid {
namespace {

using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

struct Outcome {
  int code;
  std::string output;  // standard output and error
};

/// Runs the program with these words of a shell.
Outcome braid(const std::string& words) {
  FILE* pipe = ::popen((std::string("'" BRAID_PROGRAM "' ") + words + " 2>&1").c_str(), "r");
  if (pipe == nullptr) throw std::runtime_error("no shell");
  std::string output;
  for (int c = 0; (c = std::fgetc(pipe)) != EOF;) output += static_cast<char>(c);
  const int status = ::pclose(pipe);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, output};
}

/// Expects a caller's error: exit code 2 and one line that contains `text`.
void expect_refused(const std::string& words, const std::string& text) {
  const auto [code, output] = braid(words);
  EXPECT_EQ(code, 2) << words;
  EXPECT_THAT(output, StartsWith("braid: error: ")) << words;
  EXPECT_THAT(output, HasSubstr(text)) << words;
  EXPECT_EQ(std::count(output.begin(), output.end(), '\n'), 1) << output;
}

TEST(Program, HelpAndVersion) {
  EXPECT_EQ(braid("--help").code, 0);
  EXPECT_THAT(braid("--help").output, HasSubstr("launch"));
  EXPECT_THAT(braid("--version").output, StartsWith("braid "));
}

TEST(Program, RefusesWrongCommandLinesInOneLine) {
  expect_refused("", "no command given");
  expect_refused("sing", "sing");
  expect_refused("launch --nproc 2", "no program given");
  expect_refused("launch --nproc 0 -- true", "--nproc is '0', expected an integer at least 1");
  expect_refused("launch --nproc two -- true", "--nproc is 'two', expected an integer");
  expect_refused("launch -- true", "required: --nproc");
  expect_refused("launch --np 2", "--np");
  expect_refused("launch --nproc 2 -- /no/such/program", "/no/such/program");
}

TEST(Program, RefusesWrongHosts) {
  const auto launch = [](const std::string& flags) {
    return "launch --nproc 1 " + flags + " -- true";
  };
  expect_refused(launch("--nnodes 2"), "--nnodes is 2, and --master-addr is missing");
  expect_refused(launch("--nnodes 2 --node-rank 2 --master-addr localhost"),
                 "--node-rank is 2, expected below --nnodes 2");
  expect_refused(launch("--node-rank -1"), "--node-rank is '-1', expected an integer at least 0");
  expect_refused(launch("--master-port 70000"),
                 "--master-port is '70000', expected an integer at least 1 and below 65536");
  expect_refused(launch("--interface eth77"),
                 "--interface is 'eth77', which is no network interface");
  expect_refused(launch("--nnodes 2 --master-addr localhost --interface 127.0.0.1"),
                 "--interface is '127.0.0.1', which other hosts can't reach, and --nnodes is 2");
}

TEST(Program, LaunchOfOneHostAtAGivenPort) {
  const auto [code, output] = braid(
      "launch --nproc 2 --nnodes 1 --master-addr localhost --master-port 29717 --interface lo "
      "-- sh -c 'echo $RANK/$WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $BRAID_INTERFACE'");
  EXPECT_EQ(code, 0) << output;
  EXPECT_THAT(output, HasSubstr("1/2 localhost:29717 lo\n"));
}

TEST(Program, LaunchPassesArgumentsAndExitCodes) {
  const auto [code, output] =
      braid("launch --nproc 2 -- sh -c 'echo \"$0 $1 of rank $RANK\"; exit $RANK' a --b");
  EXPECT_EQ(code, 1);
  EXPECT_THAT(output, HasSubstr("a --b of rank 0\n"));
  EXPECT_THAT(output, HasSubstr("exited with code 1"));
}

TEST(Program, RanksSayACallersErrorOnce) {
  // Both ranks are programs whose own command line is wrong.
  expect_refused("launch --nproc 2 -- '" BRAID_PROGRAM "' launch --nproc -3 -- true",
                 "--nproc is '-3'");
}

TEST(Program, BenchOpsOfAnyShape) {
  for (const std::string op : {"all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"}) {
    for (const std::string shape : {"--m 1 --n 2 --k 2", "--m 33 --n 5 --k 7"}) {
      const auto [code, output] =
          braid("bench ops --json --rounds 1 --dtype bf16 --op " + op + " " + shape);
      EXPECT_EQ(code, 0) << output;
      const auto line = nlohmann::json::parse(output);
      EXPECT_EQ(line["ranks"], 2);
      EXPECT_GT(line["fused_s"], 0);
      EXPECT_GT(line["plans_s"]["serial_native"], 0);
      EXPECT_FALSE(line["auto_mode"].get<std::string>().empty());
    }
  }
  expect_refused("bench ops --op matmul_all_reduce --m 4 --n 4 --k 1", "--k 1");
  expect_refused("bench ops --op matmul_all_reduce --m 0 --n 4 --k 1",
                 "--m is '0', expected an integer");
  expect_refused("bench ops --op matmul_all_reduce --m 4 --n 4", "--k is required");
  expect_refused("bench ops --m 4 --n 4 --k 4", "--op is required");
  expect_refused("bench ops --sweep --m 5", "--m is 5");
  expect_refused("bench int8 --rounds many", "--rounds is 'many', expected an integer");
}

TEST(Program, HelpOfABenchIsOfWhatItNeeds) {
  const auto [code, output] = braid("bench step --help");
  EXPECT_EQ(code, 0);
  EXPECT_THAT(output, HasSubstr("--num-layers N (required)"));
  EXPECT_THAT(output, HasSubstr("--train-iters N=10"));
  for (const char* flag : {"--data-path", "--save", "--eval-iters"})
    EXPECT_THAT(output, Not(HasSubstr(flag)));
  EXPECT_THAT(braid("train --help").output, HasSubstr("--data-path PATH (required)"));
}

TEST(Program, UnknownFlagsOfAllCommandsHaveAHint) {
  expect_refused("launch --nproc-per-node 2 -- true", "did you mean --nproc?");
  expect_refused("bench ops --row 4", "unknown flag --row");
  expect_refused("--verbose", "unknown flag --verbose");
  expect_refused("--verbose train --num-layers 2", "unknown flag --verbose");
}

TEST(Program, BenchInt8) {
  const auto [code, output] = braid("bench int8 --n 40 --k 50 --rounds 1 --json");
  EXPECT_EQ(code, 0) << output;
  EXPECT_GT(nlohmann::json::parse(output.substr(0, output.find('\n')))["int8_channel_s"], 0);
}

TEST(Program, BenchStep) {
  const auto [code, output] = braid(
      "bench step --json --nproc 2 --tensor-model-parallel-size 2 --use-coc --coc-fused-kernel "
      "--bf16 "
      "--num-layers 1 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --micro-batch-size "
      "1 "
      "--lr 1e-3 --train-iters 2");
  EXPECT_EQ(code, 0) << output;
  const auto line = nlohmann::json::parse(output);
  EXPECT_EQ(line["mode"], "fused");
  EXPECT_GT(line["step_s"], 0);
  EXPECT_GT(line["no_comm_step_s"], 0);
}

TEST(Program, BenchStepOfDataParallelRanks) {
  const auto [code, output] = braid(
      "bench step --nproc 4 --tensor-model-parallel-size 2 --sequence-parallel --use-coc "
      "--coc-fused-kernel --overlap-grad-reduce --ddp-bucket-size 5000 --num-layers 2 "
      "--hidden-size 64 --num-attention-heads 2 --seq-length 32 --micro-batch-size 1 "
      "--global-batch-size 4 --train-iters 2");
  EXPECT_EQ(code, 0) << output;
  EXPECT_THAT(output, ContainsRegex("overlap_grad_reduce +true"));
  EXPECT_THAT(output, ContainsRegex("no_comm_step_s +[0-9]"));
  EXPECT_THAT(output, ContainsRegex("\ngrad_reduce +[0-9]"));
}

}  // namespace
}  // namespace braid
