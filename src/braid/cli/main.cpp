// The program `braid`: reads the command line, runs the chosen subcommand, turns errors into one
// line and an exit code.
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <string>

#include "braid/cli/commands.h"
#include "braid/cli/output.h"
#include "braid/comm/launch.h"
#include "braid/core/check.h"
#include "braid/core/log.h"
#include "braid/core/memory.h"
#include "braid/train/config.h"

namespace {

constexpr int kFailed = 1;  // peer, network, bug
constexpr int kCallersError = 2;

/// Says an error in one line: where there is a launcher through it, which says it once for all ranks.
int fail(std::string text, int code) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  bool told = false;
  try {
    told = braid::report_to_launcher(braid::place_from_environment(), text);
  } catch (const c10::ValueError&) {  // the place itself is what is wrong
  }
  if (!told) braid::say_error(text);
  return code;
}

/// libtorch's own lines about the network would surround each error that is said in one; they can be asked for.
void quieten_libtorch() {
  constexpr int kFatal = 3;
  if (std::getenv("TORCH_CPP_LOG_LEVEL") != nullptr)
    c10::initLogging();
  else
    FLAGS_caffe2_log_level = kFatal;
}

}  // namespace

int main(int argc, char** argv) {
  braid::cli::occupy_standard_streams();
  quieten_libtorch();
  braid::keep_memory();
  CLI::App app{"Tensor-parallel training with communication woven into its matmuls.", "braid"};
  app.set_version_flag("--version", "braid " BRAID_VERSION);
  braid::cli::Body body;
  braid::cli::add_train(app, body);
  braid::cli::add_bench(app, body);
  braid::cli::add_generate(app, body);
  braid::cli::add_tune(app, body);
  braid::cli::add_launch(app, body);
  try {
    try {
      app.parse(argc, argv);
    } catch (const CLI::Success& asked) {  // for the help or the version
      std::ostringstream text;
      (void)app.exit(asked, text);
      braid::cli::print_text(text.str());
      return 0;
    } catch (const CLI::ExtrasError&) {
      braid::explain_extras(app);
    }
    BRAID_CHECK(body, "no command given. HINT: braid --help");
    return body();
  } catch (const CLI::ParseError& error) {
    return fail(error.what(), kCallersError);
  } catch (const c10::ValueError& error) {
    return fail(error.what_without_backtrace(), kCallersError);
  } catch (const c10::Error& error) {
    return fail(error.what_without_backtrace(), kFailed);
  } catch (const std::exception& error) {
    return fail(error.what(), kFailed);
  }
}
