// braid launch: any program on several ranks of this host, started and watched together.
#include <memory>

#include "braid/cli/commands.h"
#include "braid/cli/numbers.h"
#include "braid/comm/launch.h"
#include "braid/core/check.h"

namespace braid::cli {

void add_launch(CLI::App& app, Body& body) {
  struct Flags {
    int num_ranks = 0;
    std::vector<std::string> command;
  };
  auto flags = std::make_shared<Flags>();
  auto* launch = app.add_subcommand("launch", "run a program on several ranks of this host");
  add_number(*launch, "nproc", flags->num_ranks, kCount, "ranks to start")
      ->option_text("N (required)");
  launch->add_option("command", flags->command, "the program and its arguments, after --")
      ->option_text("PROGRAM ARGUMENTS...");
  launch->positionals_at_end();
  launch->callback([flags, &body] {
    body = [flags] {
      const auto& command = flags->command;
      BRAID_CHECK(flags->num_ranks > 0, "required: --nproc");
      BRAID_CHECK(!command.empty(),
                  "no program given. HINT: braid launch --nproc 2 -- PROGRAM ARGUMENTS");
      return launch_ranks(flags->num_ranks, {command.begin() + 1, command.end()}, command.front());
    };
  });
}

}  // namespace braid::cli
