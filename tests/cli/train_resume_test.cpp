// `braid train` repeated gives the same bits; `--load` goes on bit for bit, and at any tensor-parallel degree.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/cli/train_program.h"

namespace braid {
namespace {

using test::TrainFolder;
using test::Words;

Words operator+(Words a, const Words& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

const Words kTwoRanks{"--nproc", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel"};
const Words kFused{"--use-coc", "--coc-fused-kernel"};
const Words kAuto{"--use-coc", "--coc-mode", "auto"};
const Words kMicroBatches{"--micro-batch-size", "1"};

/// Expects the same bytes in both checkpoints, iter_ folders.
void expect_same_checkpoint(const std::string& a, const std::string& b) {
  for (const char* name : {"model.safetensors", "optimizer.safetensors", "config.json"}) {
    const std::string bytes = test::read_text(a + "/" + name);
    EXPECT_GT(bytes.size(), 100u) << a << name;
    EXPECT_TRUE(bytes == test::read_text(b + "/" + name)) << name << " of " << a << " and " << b;
  }
  auto state = nlohmann::json::parse(test::read_text(a + "/trainer_state.json"));
  auto other = nlohmann::json::parse(test::read_text(b + "/trainer_state.json"));
  state.erase("config");  // has the paths
  other.erase("config");
  EXPECT_EQ(state, other);
}

/// Losses, gradient norms and learning rates of iterations after `after`, by iteration.
std::map<int, std::vector<double>> numbers(const TrainFolder& folder, const std::string& output_dir,
                                           int after = 0) {
  std::map<int, std::vector<double>> found;
  for (const auto& line : folder.metrics(output_dir)) {
    if (line["iteration"] <= after) continue;
    std::vector<double>& values = found[line["iteration"]];
    values = {line["loss"], line["grad_norm"], line["lr"]};
    if (line.contains("validation_loss")) values.push_back(line["validation_loss"]);
  }
  return found;
}

struct Case {
  const char* name;
  Words flags;
};
std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

class Run : public testing::TestWithParam<Case> {
 protected:
  TrainFolder folder_;
};

// Ten iterations; five, then five more: from a checkpoint in the middle of the first run (the tuner's
// choices are in it).
TEST_P(Run, GoesOnBitForBit) {
  const Words& flags = GetParam().flags;
  folder_.run(flags + Words{"--output-dir", "straight", "--save-interval", "5"});
  folder_.run(flags +
              Words{"--output-dir", "resumed", "--load", "straight/checkpoint/iter_0000005"});
  const auto straight = numbers(folder_, "straight", 5);
  ASSERT_EQ(straight.size(), 5u);
  EXPECT_EQ(straight, numbers(folder_, "resumed"));
  expect_same_checkpoint(folder_ / "straight/checkpoint/iter_0000010",
                         folder_ / "resumed/checkpoint/iter_0000010");
}

INSTANTIATE_TEST_SUITE_P(
    Resume, Run,
    testing::Values(Case{"one", {}}, Case{"fused", kTwoRanks + kFused},
                    Case{"auto", kTwoRanks + kAuto},
                    Case{"bf16",
                         Words{"--bf16", "--recompute-granularity", "full"} + kTwoRanks + kFused},
                    Case{"dp", Words{"--nproc", "4", "--tensor-model-parallel-size", "2"} + kFused +
                                   kMicroBatches}),
    testing::PrintToStringParamName());

TEST(Resume, ARunRepeatedGivesTheSameBits) {
  const TrainFolder folder;
  for (const auto& [name, flags] : {Case{"fused", kTwoRanks + kFused},
                                    Case{"auto", kTwoRanks + kAuto + Words{"--deterministic"}}}) {
    for (const std::string run : {"a", "b"}) folder.run(flags + Words{"--output-dir", name + run});
    const std::string a = name + std::string("a"), b = name + std::string("b");
    ASSERT_EQ(numbers(folder, a).size(), 10u);
    EXPECT_EQ(numbers(folder, a), numbers(folder, b));
    expect_same_checkpoint(folder / (a + "/checkpoint/iter_0000010"),
                           folder / (b + "/checkpoint/iter_0000010"));
  }
}

// Whatever it would measure now.
TEST(Resume, TheTunersChoicesComeFromTheCheckpoint) {
  const TrainFolder folder;
  folder.run(kTwoRanks + kAuto + Words{"--train-iters", "5"});
  const std::string path = folder / "runs/train/checkpoint/iter_0000005/trainer_state.json";
  auto state = nlohmann::json::parse(test::read_text(path));
  ASSERT_GT(state["tuner"].size(), 4u);
  int chunks = 3;
  for (auto& choice : state["tuner"])  // none that it would choose
    choice = fmt::format("chunked {}", chunks++);
  test::write_text(path, state.dump());
  folder.run(kTwoRanks + kAuto + Words{"--load", "runs/train/checkpoint"});
  const auto resumed = nlohmann::json::parse(
      test::read_text(folder / "runs/train/checkpoint/latest/trainer_state.json"));
  EXPECT_EQ(resumed["tuner"], state["tuner"]);
}

// In the same folder: five iterations, then --train-iters is raised; the metrics go on, the checkpoint is the latest.
TEST(Resume, GoesOnInItsOwnFolder) {
  const TrainFolder folder;
  const Words flags = kTwoRanks + kFused + Words{"--lr-decay-iters", "10"};
  folder.run(flags + Words{"--output-dir", "straight"});
  folder.run(flags + Words{"--train-iters", "5"});
  folder.run(flags + Words{"--load", "runs/train/checkpoint"});
  auto straight = numbers(folder, "straight"), both = numbers(folder, "runs/train");
  ASSERT_EQ(both.size(), 10u);
  EXPECT_EQ(both[5].size(), 4u);  // a validation at the end of the first run
  both[5].pop_back();
  EXPECT_EQ(straight, both);
  expect_same_checkpoint(folder / "straight/checkpoint/iter_0000010",
                         folder / "runs/train/checkpoint/latest");
}

TEST(Resume, AtAnotherDegreeTheLossesGoOn) {
  const TrainFolder folder;
  folder.run(kTwoRanks + kFused + Words{"--output-dir", "two", "--save-interval", "5"});
  const auto expected = numbers(folder, "two", 5);
  for (const auto& [name, flags] :
       {Case{"one", {}},
        Case{"four", Words{"--nproc", "4", "--tensor-model-parallel-size", "4"} + kAuto},
        Case{"dp",
             Words{"--nproc", "4", "--tensor-model-parallel-size", "2", "--sequence-parallel"} +
                 kMicroBatches}}) {
    folder.run(flags + Words{"--output-dir", name, "--load", "two/checkpoint/iter_0000005"});
    const auto found = numbers(folder, name);
    ASSERT_EQ(found.size(), expected.size()) << name;
    for (const auto& [iteration, values] : expected) {
      for (std::size_t i = 0; i < values.size(); ++i) {
        EXPECT_NEAR(found.at(iteration)[i], values[i], (i == 1 ? 1e-3 : 1e-4) * std::abs(values[i]))
            << name << ", iteration " << iteration;
      }
    }
  }
}

// Settings that change the order of the data or the learning rates are allowed, and said.
TEST(Resume, OtherDataIsSaid) {
  const TrainFolder folder;
  folder.run(Words{"--train-iters", "1"});
  test::Program program(folder.path(),
                        TrainFolder::train({"--load", "runs/train/checkpoint", "--seed", "5",
                                            "--global-batch-size", "2"}));
  EXPECT_EQ(program.wait(), 0) << program.error();
  EXPECT_NE(program.error().find("--seed is 5, the checkpoint's is 1234"), std::string::npos)
      << program.error();
  EXPECT_NE(program.error().find("--lr-decay-iters is 10, the checkpoint's is 1"),
            std::string::npos)
      << program.error();
  EXPECT_NE(program.error().find("--global-batch-size is 2, the checkpoint's is 4"),
            std::string::npos)
      << program.error();
}

// A run with nothing left to do says so and leaves the checkpoint as it is.
TEST(Resume, NothingLeftToTrain) {
  const TrainFolder folder;
  folder.run(kTwoRanks);
  const auto before = std::filesystem::last_write_time(
      folder / "runs/train/checkpoint/iter_0000010/model.safetensors");
  test::Program program(folder.path(),
                        TrainFolder::train(kTwoRanks + Words{"--load", "runs/train/checkpoint"}));
  EXPECT_EQ(program.wait(), 0) << program.error();
  EXPECT_NE(program.error().find("--train-iters is 10: nothing is left to train"),
            std::string::npos)
      << program.error();
  EXPECT_EQ(before, std::filesystem::last_write_time(
                        folder / "runs/train/checkpoint/iter_0000010/model.safetensors"));
  EXPECT_EQ(folder.metrics().size(), 10u);
}

}  // namespace
}  // namespace braid
