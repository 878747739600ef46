// Where a rank's place comes from, and how `--nproc N` starts and watches ranks on this host.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace braid {

/// A rank's place, from the environment: torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK,
/// LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), else Slurm's, else Open MPI's; a single rank if
/// there are none.
struct Place {
  int rank = 0, world_size = 1, local_rank = 0, local_world_size = 1;
  std::string master_addr;  // empty: no rendezvous needed
  int master_port = 0;
  bool launched = false;  // by launch_ranks: its store is hosted by the launcher
};

/// Errors: ValueError naming the variables that are missing or contradict each other, and their
/// values.
Place place_from_environment();

/// Connects to the rendezvous store. Errors: DistBackendError within `timeout` when the master
/// can't be reached.
c10::intrusive_ptr<c10d::Store> connect_store(const Place& place,
                                              std::chrono::milliseconds timeout);

/// Gives this rank its part of the allowed cores (affinity), and ATen as many threads.
void share_cores(const Place& place);

/// Runs this executable `num_ranks` times with `arguments`, each with its place in the environment,
/// and watches them. Returns the exit code: 0; a rank's own code when it exits with one; 1 when a
/// signal killed one (it is named, with the signal). All end when one does; all end when this
/// process is killed.
int launch_ranks(int num_ranks, const std::vector<std::string>& arguments);

}  // namespace braid
