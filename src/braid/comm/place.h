// A rank's place among the others: read from the environment, then the store where ranks meet and
// the cores it uses.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

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
};

/// This rank's place: torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
/// MASTER_ADDR, MASTER_PORT), else Slurm's (inside a step), else Open MPI's; a single rank if there
/// are none. With Slurm and Open MPI, MASTER_ADDR and MASTER_PORT are used where set; otherwise the
/// first host of the step, and a port made from the job's number.
///   Errors   ValueError naming the variables that are missing or contradict each other, with values
Place place_from_environment();

/// Connects to the store where the run's ranks meet; rank 0 hosts it where no launcher does. In
/// memory for a single rank without a launcher.
///   Errors   DistBackendError within `timeout`: the store can't be reached, or is another run's
c10::intrusive_ptr<c10d::Store> connect_store(const Place& place,
                                              std::chrono::milliseconds timeout);

/// Divides the cores that this rank is allowed to use with the ranks that are allowed the very same
/// ones (affinity), and gives ATen as many threads. A launcher that has bound each rank to cores of
/// its own is thus left as it is.
///   Order    collective over the store's ranks, once per store; before the thread starts others
void share_cores(const Place& place, c10d::Store& store);

}  // namespace braid
