// What a trainer keeps between steps.
#include <gtest/gtest.h>

#include "braid/ops/tuner.h"
#include "tests/train/small_run.h"

namespace braid {
namespace {

// A checkpoint holds one set of choices, so every tensor-parallel group must use it, too.
TEST(Trainer, TheTunersChoicesAreThoseOfTheFirstDataParallelRank) {
  TrainConfig config = test::small_model();
  config.tensor_model_parallel_size = 2;
  config.use_coc = true;
  test::run_trainers(config, 4, [](Trainer& trainer, const DataSplit&, int rank) {
    trainer.step(0);
    nlohmann::json choices = tuner::choices();
    ASSERT_GT(choices.size(), 0u);
    choices["one more shape"] = "serial";
    for (auto& choice : choices)
      choice = rank < 2 ? "serial" : "fused";  // ranks 0 and 1 are the first tp group
    tuner::set_choices(choices);
    trainer.step(1);
    EXPECT_EQ(tuner::choices().size(), choices.size());
    for (const auto& choice : tuner::choices()) EXPECT_EQ(choice, "serial") << rank;
  });
}

}  // namespace
}  // namespace braid
