// The subcommands of `braid`: each adds its flags and help to the program, and is a screenful.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "braid/comm/place.h"
#include "braid/train/config.h"

namespace braid::cli {

/// The body of the chosen subcommand; gives the exit code. Throws c10::ValueError for caller's
/// errors (exit code 2).
using Body = std::function<int()>;

/// Each adds one subcommand to `app` and, when it is chosen, sets `body`.
void add_train(CLI::App& app, Body& body);
void add_bench(CLI::App& app, Body& body);
void add_generate(CLI::App& app, Body& body);
void add_tune(CLI::App& app, Body& body);
void add_launch(CLI::App& app, Body& body);

/// Runs this command line on `num_ranks` ranks of this host, unless this process is a rank already:
/// then nothing is started and nothing is returned. Otherwise returns the exit code of the run.
/// Empty: as the environment says, else one.
///   Errors   ValueError when torchrun, Slurm or Open MPI have started another number on this host
std::optional<int> run_on_ranks(std::optional<int> num_ranks);
/// The same for the ranks of a training run, once its settings are checked and warnings are said.
///   needs_data   also checks what the settings name: data, checkpoint, folders
///   Errors       ValueError as validate() and check_inputs()
std::optional<int> run_on_ranks(TrainConfig& config, const Place& place, bool needs_data);

/// This process's command line, without the program's name.
std::vector<std::string> command_line();

}  // namespace braid::cli
