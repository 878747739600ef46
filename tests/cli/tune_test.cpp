// `braid tune` and --tuner-file as a person uses them: what is measured, pins, mistakes in the file.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/inotify.h>

#include "tests/cli/train_program.h"

namespace braid {
namespace {

using nlohmann::json;
using test::Program;
using test::Words;
using testing::HasSubstr;

class Tune : public testing::Test {
 protected:
  /// A command with the flags that tune needs, on two ranks.
  static Words tune(const Words& more = {}) {
    Words words{"tune",       "--tuner-file",
                "tuner.json", "--nproc",
                "2",          "--tensor-model-parallel-size",
                "2",          "--num-layers",
                "1",          "--hidden-size",
                "32",         "--num-attention-heads",
                "2",          "--seq-length",
                "32",         "--micro-batch-size",
                "1"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  void write_pins(const json& pins) const {
    folder_.write("tuner.json", json{{"choices", pins}}.dump());
  }
  json choices() const {
    return json::parse(test::read_text(folder_ / "tuner.json")).at("choices");
  }
  test::TrainFolder folder_;
};

TEST_F(Tune, NeedsNeitherDataNorALearningRateAndWritesItsFileOnce) {
  const int events = ::inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
  ASSERT_GE(::inotify_add_watch(events, folder_.path().c_str(), IN_MOVED_TO), 0);
  Program program(folder_.path(), tune());
  EXPECT_EQ(program.wait(), 0) << program.error();
  EXPECT_GT(choices().size(), 4u);
  const json measured = choices();
  for (const auto& [key, plan] : measured.items()) EXPECT_THAT(program.out(), HasSubstr(key));
  EXPECT_THAT(program.out(), HasSubstr(" new\n"));
  alignas(inotify_event) std::array<char, 4096> buffer;
  const auto bytes = ::read(events, buffer.data(), buffer.size());
  ::close(events);
  ASSERT_GE(bytes, static_cast<ssize_t>(sizeof(inotify_event)));
  const auto* first = reinterpret_cast<const inotify_event*>(buffer.data());
  EXPECT_EQ(bytes, static_cast<ssize_t>(sizeof(inotify_event) + first->len));  // one event
  Program again(folder_.path(), tune());
  EXPECT_EQ(again.wait(), 0) << again.error();
  EXPECT_THAT(again.out(), testing::Not(HasSubstr(" new\n")));
}

TEST_F(Tune, PinsAreUsedOrNamed) {
  const std::string typo = "* m=* n=31 k=* f32 ranks=2 host";
  write_pins({{"* m=* n=* k=* f32 ranks=2 host", "serial"}, {typo, "fused"}});
  const std::string warning =
      "braid: warning: --tuner-file tuner.json: no operation of this run went by a pin: '" + typo +
      "'\n";
  Program tuned(folder_.path(), tune());
  EXPECT_EQ(tuned.wait(), 0);
  EXPECT_THAT(tuned.error(), HasSubstr(warning));
  EXPECT_EQ(choices().size(), 2u);
  const Words two_ranks{"--nproc", "2", "--tensor-model-parallel-size", "2", "--train-iters", "2"};
  Words words = test::TrainFolder::train({"--use-coc", "--tuner-file", "tuner.json"});
  words.insert(words.end(), two_ranks.begin(), two_ranks.end());
  Program trained(folder_.path(), words);
  EXPECT_EQ(trained.wait(), 0);
  EXPECT_THAT(trained.error(), HasSubstr(warning));
  EXPECT_THAT(trained.error(), HasSubstr("--use-coc overlaps nothing: mode auto runs all"));
  Program generated(folder_.path(),
                    {"generate", "--load", "runs/train/checkpoint", "--nproc", "2", "--tuner-file",
                     "tuner.json", "--prompt", "a", "--max-new-tokens", "2"});
  EXPECT_EQ(generated.wait(), 0);
  EXPECT_EQ(generated.error(), warning);
}

TEST_F(Tune, AKeyThatNoOperationHasIsRefused) {
  write_pins({{"all_gather_matmull m=* n=* k=* * * *", "serial"}});
  Program program(folder_.path(), tune());
  EXPECT_EQ(program.wait(), 2);
  EXPECT_THAT(program.error(),
              testing::AllOf(HasSubstr("tuner.json"), HasSubstr("'all_gather_matmull'")));
}

}  // namespace
}  // namespace braid
