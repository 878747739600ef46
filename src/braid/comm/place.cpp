// Reads a rank's place from launchers' variables.
#include "braid/comm/place.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "braid/core/check.h"

namespace braid {
namespace {

std::string text_of(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::optional<int> number_of(const char* name) {
  const std::string text = text_of(name);
  if (text.empty()) return std::nullopt;
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  BRAID_CHECK(error == std::errc{} && end == text.data() + text.size(), name, " is '", text,
              "', expected a number");
  return value;
}

int required(const char* name, const char* because) {
  const auto value = number_of(name);
  BRAID_CHECK(value, name, " is missing, but ", because, "='", text_of(because),
              "' is set. HINT: start ranks with torchrun, srun, mpirun or --nproc");
  return *value;
}

/// A port below the ephemeral range, different for most runs.
int port_of(const std::string& run) {
  return 20000 + static_cast<int>(std::hash<std::string>{}(run) % 10000);
}

void fill_torchrun(Place& place) {
  const char* const names[] = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
  const char* because = *std::find_if(std::begin(names), std::end(names),
                                      [](auto name) { return !text_of(name).empty(); });
  place.source = "torchrun";
  place.rank = required("RANK", because);
  place.world_size = required("WORLD_SIZE", because);
  place.local_rank = required("LOCAL_RANK", because);
  place.local_world_size = required("LOCAL_WORLD_SIZE", because);
  place.store_hosted = text_of("TORCHELASTIC_USE_AGENT_STORE") == "True";
  place.launched = !text_of("BRAID_LAUNCHED").empty();
  place.launched_by_itself = text_of("BRAID_LAUNCHED") == "self";
  place.run = text_of("TORCHELASTIC_RUN_ID");
  place.attempt = number_of("TORCHELASTIC_RESTART_COUNT").value_or(0);
  const bool meets = place.world_size > 1 || place.store_hosted;
  if (meets) required("MASTER_PORT", "WORLD_SIZE");
  BRAID_CHECK(!meets || !text_of("MASTER_ADDR").empty(),
              "MASTER_ADDR is missing, but WORLD_SIZE is ", place.world_size);
}

/// The first host of a Slurm list: "gpu[03-05,7],login" gives "gpu03".
std::string first_host(const std::string& list) {
  std::string host;
  for (std::size_t i = 0; i < list.size() && list[i] != ','; ++i) {
    if (list[i] != '[') {
      host += list[i];
      continue;
    }
    for (++i; i < list.size() && list[i] != ',' && list[i] != '-' && list[i] != ']'; ++i)
      host += list[i];
    i = std::min(list.find(']', i), list.size());
  }
  return host;
}

/// Tasks of one host from Slurm's "2(x3),1": hosts 0 to 2 have 2, host 3 has 1.
int tasks_of_host(const std::string& list, int host) {
  const char* p = host < 0 ? "" : list.c_str();
  for (char* end = nullptr; *p != '\0'; p = *end == ',' ? end + 1 : end) {
    const long tasks = std::strtol(p, &end, 10);
    long hosts = 1;
    if (std::string_view(end).starts_with("(x")) {
      hosts = std::strtol(end + 2, &end, 10);
      if (*end == ')') ++end;
    }
    if (end == p || (*end != ',' && *end != '\0')) break;
    if (host < hosts) return static_cast<int>(tasks);
    host -= static_cast<int>(hosts);
  }
  BRAID_CHECK(false, "SLURM_STEP_TASKS_PER_NODE is '", list, "': no host ", text_of("SLURM_NODEID"),
              " (SLURM_NODEID)");
}

void fill_slurm(Place& place) {
  constexpr auto because = "SLURM_STEP_NUM_TASKS";
  place.source = "Slurm";
  place.rank = required("SLURM_PROCID", because);
  place.world_size = required("SLURM_STEP_NUM_TASKS", because);
  place.local_rank = required("SLURM_LOCALID", because);
  place.local_world_size =
      tasks_of_host(text_of("SLURM_STEP_TASKS_PER_NODE"), required("SLURM_NODEID", because));
  place.run = fmt::format("Slurm {}.{}", text_of("SLURM_JOB_ID"), text_of("SLURM_STEP_ID"));
  place.master_addr =
      place.on_one_host() ? "127.0.0.1" : first_host(text_of("SLURM_STEP_NODELIST"));
}

void fill_open_mpi(Place& place) {
  constexpr auto because = "OMPI_COMM_WORLD_SIZE";
  place.source = "Open MPI";
  place.rank = required("OMPI_COMM_WORLD_RANK", because);
  place.world_size = required("OMPI_COMM_WORLD_SIZE", because);
  place.local_rank = required("OMPI_COMM_WORLD_LOCAL_RANK", because);
  place.local_world_size = required("OMPI_COMM_WORLD_LOCAL_SIZE", because);
  place.run =
      fmt::format("Open MPI {}{}", text_of("PMIX_NAMESPACE"), text_of("OMPI_MCA_ess_base_jobid"));
  if (place.on_one_host()) place.master_addr = "127.0.0.1";
}

void check(const Place& p) {
  const std::string got = fmt::format("{} says rank {} of {}, local rank {} of {}", p.source,
                                      p.rank, p.world_size, p.local_rank, p.local_world_size);
  BRAID_CHECK(p.world_size >= 1 && p.rank >= 0 && p.rank < p.world_size, got,
              ": the rank is not within the world size (RANK, WORLD_SIZE)");
  BRAID_CHECK(p.local_world_size >= 1 && p.local_rank >= 0 && p.local_rank < p.local_world_size,
              got,
              ": the local rank is not within the local world size (LOCAL_RANK, LOCAL_WORLD_SIZE)");
  BRAID_CHECK(
      p.local_world_size <= p.world_size && p.local_rank <= p.rank, got,
      ": there can't be more ranks on this host than in all (LOCAL_WORLD_SIZE, WORLD_SIZE)");
  if (p.world_size == 1 && !p.store_hosted) return;
  BRAID_CHECK(!p.master_addr.empty(), got,
              ": MASTER_ADDR is missing. HINT: set it to the host of rank 0");
  BRAID_CHECK(p.master_port >= 1 && p.master_port <= 65535, "MASTER_PORT is ", p.master_port,
              ", expected 1 to 65535");
}

}  // namespace

Place place_from_environment() {
  Place place;
  if (!text_of("RANK").empty() || !text_of("WORLD_SIZE").empty() ||
      !text_of("LOCAL_RANK").empty() || !text_of("LOCAL_WORLD_SIZE").empty()) {
    fill_torchrun(place);
  } else if (!text_of("SLURM_STEP_NUM_TASKS").empty()) {
    fill_slurm(place);
  } else if (!text_of("OMPI_COMM_WORLD_SIZE").empty()) {
    fill_open_mpi(place);
  } else {
    return place;
  }
  if (place.world_size == 1 && place.source != "torchrun")
    return {};  // one task of a batch script or of mpirun -n 1
  if (const auto addr = text_of("MASTER_ADDR"); !addr.empty()) place.master_addr = addr;
  place.master_port = number_of("MASTER_PORT").value_or(place.run.empty() ? 0 : port_of(place.run));
  check(place);
  return place;
}

}  // namespace braid
