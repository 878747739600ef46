// A rank's place among the others, read from the environment.
#pragma once

#include <string>

namespace braid {

struct Place {
  int rank = 0, world_size = 1, local_rank = 0, local_world_size = 1;
  std::string master_addr;  // empty: no rendezvous needed
  int master_port = 0;
  bool store_hosted =
      false;              // by launch_ranks or torchrun's agent; otherwise rank 0 hosts the store
  bool launched = false;  // by launch_ranks
  bool launched_by_itself = false;  // by this program, with the same command line
  std::string source;  // "torchrun" (launch_ranks too), "Slurm", "Open MPI"; empty: none, one rank
  std::string run;     // what tells this run from others that could meet at the same address
  int attempt = 0;     // of a launcher that starts ranks again, at the same store

  /// The rank that hosts the store; -1: a launcher does.
  int store_rank() const { return store_hosted ? -1 : 0; }
  bool on_one_host() const { return local_world_size == world_size; }
};

/// This rank's place: torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
/// MASTER_ADDR, MASTER_PORT), else Slurm's (inside a step), else Open MPI's; a single rank if there
/// are none. With Slurm and Open MPI, MASTER_ADDR and MASTER_PORT are used where set; otherwise the
/// first host of the step, and a port made from the job's number.
///   Errors   ValueError naming the variables that are missing or contradict each other, with values
Place place_from_environment();

}  // namespace braid
