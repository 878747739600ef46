// braid launch: any program on several ranks of this host, and of others, started and watched together.
#include <memory>

#include "braid/cli/commands.h"
#include "braid/cli/numbers.h"
#include "braid/comm/launch.h"
#include "braid/core/check.h"

namespace braid::cli {
namespace {

void check_hosts(const Nodes& hosts) {
  BRAID_CHECK(hosts.rank < hosts.num, "--node-rank is ", hosts.rank, ", expected below --nnodes ",
              hosts.num);
  BRAID_CHECK(hosts.num == 1 || !hosts.master_addr.empty(), "--nnodes is ", hosts.num,
              ", and --master-addr is missing: the address of the host with --node-rank 0");
  if (hosts.interface.empty()) return;
  const auto address = own_address(hosts.interface);
  BRAID_CHECK(!address.empty(), "--interface is '", hosts.interface,
              "', which is no network interface and no address of this host");
  BRAID_CHECK(hosts.num == 1 || !is_loopback(address), "--interface is '", hosts.interface,
              "', which other hosts can't reach, and --nnodes is ", hosts.num);
}

}  // namespace

void add_launch(CLI::App& app, Body& body) {
  struct Flags {
    int num_ranks = 0;
    Nodes hosts;
    std::vector<std::string> command;
  };
  auto flags = std::make_shared<Flags>();
  auto& hosts = flags->hosts;
  auto* launch = app.add_subcommand(
      "launch",
      "run a program on several ranks of this host; of several hosts, where it is "
      "called on each of them");
  add_number(*launch, "nproc", flags->num_ranks, kCount, "ranks to start on this host")
      ->option_text("N (required)");
  add_number(*launch, "nnodes", hosts.num, kCount, "hosts of the run");
  add_number(*launch, "node-rank", hosts.rank, {0, kCount.below}, "number of this host");
  launch
      ->add_option("--master-addr", hosts.master_addr,
                   "name or address of host 0, by which all hosts reach it")
      ->option_text("ADDRESS");
  add_number(*launch, "master-port", hosts.master_port, {1, 65536},
             "port of host 0 where ranks meet");
  launch
      ->add_option("--interface", hosts.interface,
                   "network interface, or address of this host, for messages between hosts "
                   "(BRAID_INTERFACE's, else the one towards --master-addr)")
      ->option_text("NAME-OR-ADDRESS");
  launch->add_option("command", flags->command, "the program and its arguments, after --")
      ->option_text("PROGRAM ARGUMENTS...");
  launch->positionals_at_end();
  launch->callback([flags, &body] {
    body = [flags] {
      const auto& command = flags->command;
      BRAID_CHECK(flags->num_ranks > 0, "required: --nproc");
      BRAID_CHECK(!command.empty(),
                  "no program given. HINT: braid launch --nproc 2 -- PROGRAM ARGUMENTS");
      check_hosts(flags->hosts);
      return launch_ranks(flags->num_ranks, {command.begin() + 1, command.end()}, command.front(),
                          flags->hosts);
    };
  });
}

}  // namespace braid::cli
