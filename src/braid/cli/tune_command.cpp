// braid tune: measures how each operation of a model runs best, ahead of its training.
#include "braid/cli/bench.h"
#include "braid/cli/commands.h"
#include "braid/cli/output.h"
#include "braid/core/check.h"
#include "braid/ops/tuner.h"
#include "braid/ops/tuner_file.h"
#include "braid/train/run.h"

namespace braid::cli {
namespace {

void tune(const TrainConfig& config, const Place& place) {
  const Mesh mesh = start_training(config, place);
  tuner::read_choices(*mesh.world, config.tuner_file);
  TrainConfig measured = config;
  measured.tuner_file.clear();  // the trainer would write it, too, and only warn where it can't
  Trainer trainer(measured, mesh, random_batches(config, mesh.dp->rank()));
  trainer.step(0);
  if (place.rank != 0) return;
  const auto fresh = tuner::measured();
  tuner::write_choices(config.tuner_file, fresh);
  const auto choices = tuner::choices(/*with_pins=*/true);
  for (const auto& [key, plan] : choices.items())
    print("{:<72} {:<18}{}\n", key, plan.get<std::string>(), fresh.contains(key) ? " new" : "");
  tuner::warn_of_unused_pins(config.tuner_file);
}

}  // namespace

void add_tune(CLI::App& app, Body& body) {
  auto* command = app.add_subcommand(
      "tune",
      "measure how each operation of a training step runs best, into --tuner-file; takes the flags "
      "of braid train");
  command->prefix_command();
  command->set_help_flag();
  command->callback([command, &body] {
    body = [arguments = command->remaining()] {
      TrainConfig config;
      config.train_iters = 1;
      config.use_coc = true;
      CLI::App flags{"Measures, on random tokens, how each operation of a training step runs best.",
                     "braid tune"};
      add_flags(flags, config, /*needs_data=*/false);
      if (const auto text = parse(flags, arguments)) {
        print_text(*text);
        return 0;
      }
      BRAID_CHECK(!config.tuner_file.empty(), "--tuner-file is required: where the choices go");
      BRAID_CHECK(config.tensor_model_parallel_size > 1,
                  "--tensor-model-parallel-size is 1, there is nothing to tune");
      BRAID_CHECK(!config.deterministic, "--deterministic measures nothing: leave it out");
      const Place place = place_from_environment();
      if (const auto code = run_on_ranks(config, place, /*needs_data=*/false)) return *code;
      BRAID_CHECK(matmul_options(config).mode == Mode::automatic,
                  "--coc-mode, --coc-parallel-num and --coc-fused-kernel leave nothing to tune");
      tune(config, place);
      return 0;
    };
  });
}

}  // namespace braid::cli
