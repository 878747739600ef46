// How `--nproc N` starts ranks on this host, watches them and ends them together, over several hosts with the
// other hosts' launchers.
//
// Ranks get torchrun's variables, so that any program of PyTorch runs under it too, and unless they are set
// OMP_NUM_THREADS (several ranks: their part of the cores) and GLOO_SOCKET_IFNAME (of an interface that is named).
// On a single host the launcher hosts their store on a loopback port of its own: two runs on a host never meet,
// and no port is chosen before it is taken.
#pragma once

#include <string>
#include <vector>

#include "braid/comm/launchers.h"
#include "braid/comm/place.h"

namespace braid {

inline constexpr const char* kThisProgram = "/proc/self/exe";

/// Runs `program` `num_ranks` times with `arguments`, each with its place in the environment, and
/// watches them. All end when one fails (SIGTERM, after half a second SIGKILL) and it is named on
/// standard error: rank, pid, exit code or signal; so is one that had to be killed. All end when
/// this process is killed. SIGINT, SIGTERM and SIGTSTP are passed on; an interrupted rank has 5 s,
/// or until the second interrupt. (Of several hosts one that stays stopped for the time-out is lost.)
///   Gives    the exit code: 0 when every rank's is; the failed rank's own (2 before others); 1 when
///            a signal killed one; 128 + signal when interrupted, or when the first to end wrote into a
///            pipe that nobody reads (SIGPIPE), of which nothing is said. The same on all hosts, which say the
///            same; 1 when a host is lost
///   Order    on a thread that lives as long as the ranks; takes those signals and SIGCHLD meanwhile
///   hosts    where there are others, all are waited for before a rank starts, for BRAID_TIMEOUT_S
///   Errors   ValueError: num_ranks is not within 1 to 4096, too few files may be open, or the program
///            can't be run; of several hosts, as Launchers'
int launch_ranks(int num_ranks, const std::vector<std::string>& arguments,
                 const std::string& program = kThisProgram, const Nodes& hosts = {});

/// Leaves the text of a rank's error with the launcher, which says it once even if several ranks found it.
///   Gives    false when there is no launcher to say it, so that the rank must
bool report_to_launcher(const Place& place, const std::string& text) noexcept;

}  // namespace braid
