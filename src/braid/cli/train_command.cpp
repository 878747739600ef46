// braid train: trains a decoder as the flags say.
#include <csignal>
#include <memory>

#include "braid/cli/commands.h"
#include "braid/cli/output.h"
#include "braid/comm/place.h"
#include "braid/train/checkpoint.h"
#include "braid/train/config.h"
#include "braid/train/run.h"

namespace braid::cli {

void add_train(CLI::App& app, Body& body) {
  auto* train = app.add_subcommand("train", "train a decoder, split over ranks");
  train->prefix_command();  // the flag table parses what follows
  train->set_help_flag();
  train->callback([train, &body] {
    body = [arguments = train->remaining()] {
      TrainConfig config;
      CLI::App flags{
          "Trains a Llama-style decoder, split over tensor-parallel and data-parallel ranks.",
          "braid train"};
      add_flags(flags, config);
      if (const auto text = parse(flags, arguments)) {
        print_text(*text);
        return 0;
      }
      const Place place = place_from_environment();
      if (const auto code = run_on_ranks(config, place, /*needs_data=*/true)) {
        if (*code != 0) discard_partial_checkpoint(config.save);  // of a rank that was killed
        return *code;
      }
      std::signal(SIGPIPE, SIG_IGN);  // a reader of the output that goes ends no run
      run_training(config, place);
      return 0;
    };
  });
}

}  // namespace braid::cli
