// A rank's place from each launcher's variables, the store where ranks meet, the division of cores.
#include "braid/comm/place.h"

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "braid/comm/spawn.h"
#include "tests/support/environment.h"

namespace braid {
namespace {

using std::chrono_literals::operator""ms;
using testing::HasSubstr;
using Values = std::map<std::string, std::string>;

/// The place under these variables alone.
Place place_under(const Values& values) {
  Values all;
  for (const char* name : {"RANK",
                           "WORLD_SIZE",
                           "LOCAL_RANK",
                           "LOCAL_WORLD_SIZE",
                           "MASTER_ADDR",
                           "MASTER_PORT",
                           "BRAID_LAUNCHED",
                           "TORCHELASTIC_USE_AGENT_STORE",
                           "TORCHELASTIC_RUN_ID",
                           "SLURM_PROCID",
                           "SLURM_STEP_NUM_TASKS",
                           "SLURM_LOCALID",
                           "SLURM_NODEID",
                           "SLURM_STEP_TASKS_PER_NODE",
                           "SLURM_STEP_NODELIST",
                           "SLURM_JOB_ID",
                           "SLURM_STEP_ID",
                           "OMPI_COMM_WORLD_RANK",
                           "OMPI_COMM_WORLD_SIZE",
                           "OMPI_COMM_WORLD_LOCAL_RANK",
                           "OMPI_COMM_WORLD_LOCAL_SIZE",
                           "PMIX_NAMESPACE",
                           "OMPI_MCA_ess_base_jobid"}) {
    all[name];
  }
  for (const auto& [name, value] : values) all[name] = value;
  test::ScopedEnvironment environment(all);
  return place_from_environment();
}

/// The error's text under these variables.
std::string error_under(const Values& values) {
  try {
    place_under(values);
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

const Values kTorchrun{{"RANK", "5"},
                       {"WORLD_SIZE", "8"},
                       {"LOCAL_RANK", "1"},
                       {"LOCAL_WORLD_SIZE", "4"},
                       {"MASTER_ADDR", "node7"},
                       {"MASTER_PORT", "29501"}};
const Values kSlurm{{"SLURM_PROCID", "3"},
                    {"SLURM_STEP_NUM_TASKS", "7"},
                    {"SLURM_LOCALID", "1"},
                    {"SLURM_NODEID", "1"},
                    {"SLURM_STEP_TASKS_PER_NODE", "2(x3),1"},
                    {"SLURM_STEP_NODELIST", "gpu[03-05,7],login"},
                    {"SLURM_JOB_ID", "812"},
                    {"SLURM_STEP_ID", "0"}};
const Values kOpenMpi{{"OMPI_COMM_WORLD_RANK", "1"},
                      {"OMPI_COMM_WORLD_SIZE", "2"},
                      {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                      {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                      {"PMIX_NAMESPACE", "prterun-1234@1"}};

Values with(Values values, const Values& changes) {
  for (const auto& [name, value] : changes) values[name] = value;
  return values;
}

TEST(Place, SingleRankWithoutLauncher) {
  const Place place = place_under({});
  EXPECT_EQ(place.rank, 0);
  EXPECT_EQ(place.world_size, 1);
  EXPECT_EQ(place.source, "");
  EXPECT_EQ(place.master_addr, "");
}

TEST(Place, Torchrun) {
  const Place place = place_under(kTorchrun);
  EXPECT_EQ(place.rank, 5);
  EXPECT_EQ(place.world_size, 8);
  EXPECT_EQ(place.local_rank, 1);
  EXPECT_EQ(place.local_world_size, 4);
  EXPECT_EQ(place.master_addr, "node7");
  EXPECT_EQ(place.master_port, 29501);
  EXPECT_EQ(place.source, "torchrun");
  EXPECT_FALSE(place.store_hosted);
  EXPECT_TRUE(
      place_under(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}})).store_hosted);
}

TEST(Place, TorchrunOfOneRankIsNotNone) {
  const Place place = place_under(
      {{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "1"}});
  EXPECT_EQ(place.source, "torchrun");
}

TEST(Place, Slurm) {
  const Place place = place_under(kSlurm);
  EXPECT_EQ(place.rank, 3);
  EXPECT_EQ(place.world_size, 7);
  EXPECT_EQ(place.local_rank, 1);
  EXPECT_EQ(place.local_world_size, 2);
  EXPECT_EQ(place.master_addr, "gpu03");
  EXPECT_EQ(place.source, "Slurm");
  const Place last = place_under(
      with(kSlurm, {{"SLURM_PROCID", "6"}, {"SLURM_LOCALID", "0"}, {"SLURM_NODEID", "3"}}));
  EXPECT_EQ(last.local_world_size, 1);
  EXPECT_EQ(last.master_port, place.master_port);
  EXPECT_NE(place_under(with(kSlurm, {{"SLURM_JOB_ID", "813"}})).master_port, place.master_port);
}

TEST(Place, SlurmHostLists) {
  const auto host = [](const std::string& list) {
    return place_under(with(kSlurm, {{"SLURM_STEP_NODELIST", list}})).master_addr;
  };
  EXPECT_EQ(host("a1,b2"), "a1");
  EXPECT_EQ(host("rack[1-2]n[03,5]"), "rack1n03");
  EXPECT_EQ(host("n[7]-ib"), "n7-ib");
}

TEST(Place, SlurmBatchScriptIsASingleRank) {
  EXPECT_EQ(place_under({{"SLURM_PROCID", "0"}, {"SLURM_JOB_ID", "812"}}).source, "");
}

TEST(Place, OpenMpi) {
  const Place place = place_under(kOpenMpi);
  EXPECT_EQ(place.rank, 1);
  EXPECT_EQ(place.world_size, 2);
  EXPECT_EQ(place.master_addr, "127.0.0.1");
  EXPECT_EQ(place.source, "Open MPI");
  EXPECT_NE(place_under(with(kOpenMpi, {{"PMIX_NAMESPACE", "prterun-1235@1"}})).master_port,
            place.master_port);
  EXPECT_EQ(place_under(with(kOpenMpi, {{"MASTER_PORT", "4711"}})).master_port, 4711);
}

TEST(Place, TorchrunWinsOverTheLauncherAroundIt) {
  EXPECT_EQ(place_under(with(kSlurm, kTorchrun)).rank, 5);
  EXPECT_EQ(place_under(with(kOpenMpi, kTorchrun)).rank, 5);
}

TEST(Place, NamesWhatIsMissing) {
  EXPECT_THAT(error_under(with(kTorchrun, {{"LOCAL_RANK", ""}})),
              HasSubstr("LOCAL_RANK is missing, but RANK='5'"));
  EXPECT_THAT(error_under({{"WORLD_SIZE", "2"}}), HasSubstr("RANK is missing, but WORLD_SIZE='2'"));
  EXPECT_THAT(error_under(with(kTorchrun, {{"MASTER_ADDR", ""}})),
              HasSubstr("MASTER_ADDR is missing"));
  EXPECT_THAT(error_under(with(kTorchrun, {{"MASTER_PORT", ""}})),
              HasSubstr("MASTER_PORT is missing"));
  EXPECT_THAT(error_under(with(kSlurm, {{"SLURM_LOCALID", ""}})),
              HasSubstr("SLURM_LOCALID is missing"));
  EXPECT_THAT(error_under(with(kOpenMpi, {{"OMPI_COMM_WORLD_SIZE", "4"}})),
              HasSubstr("MASTER_ADDR is missing"));
}

TEST(Place, NamesBothValuesOfAContradiction) {
  EXPECT_THAT(error_under(with(kTorchrun, {{"RANK", "8"}})), HasSubstr("rank 8 of 8"));
  EXPECT_THAT(error_under(with(kTorchrun, {{"RANK", "-1"}})), HasSubstr("rank -1 of 8"));
  EXPECT_THAT(error_under(with(kTorchrun, {{"LOCAL_RANK", "4"}})), HasSubstr("local rank 4 of 4"));
  EXPECT_THAT(error_under(with(kTorchrun, {{"LOCAL_WORLD_SIZE", "9"}})),
              HasSubstr("rank 5 of 8, local rank 1 of 9"));
  EXPECT_THAT(error_under(with(kTorchrun, {{"RANK", "0"}})),
              HasSubstr("rank 0 of 8, local rank 1 of 4"));
  EXPECT_THAT(error_under(with(kTorchrun, {{"WORLD_SIZE", "8x"}})),
              HasSubstr("WORLD_SIZE is '8x'"));
  EXPECT_THAT(error_under(with(kTorchrun, {{"MASTER_PORT", "70000"}})),
              HasSubstr("MASTER_PORT is 70000"));
  EXPECT_THAT(error_under(with(kSlurm, {{"SLURM_NODEID", "4"}})),
              HasSubstr("'2(x3),1': no host 4"));
}

/// Rank `rank` of two on this host, whose store is at `port`.
Place local_place(int rank, int port) {
  Place place;
  place.rank = place.local_rank = rank;
  place.world_size = place.local_world_size = 2;
  place.master_addr = "127.0.0.1";
  place.master_port = port;
  place.run = "test";
  return place;
}

/// A port that was free a moment ago.
int free_port() { return HostedStore().port(); }

std::string connect_error(const Place& place) {
  try {
    connect_store(place, 300ms);
  } catch (const c10::DistBackendError& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

TEST(ConnectStore, RankZeroHostsIt) {
  const int port = free_port();
  const auto host = connect_store(local_place(0, port), 5000ms);
  const auto guest = connect_store(local_place(1, port), 5000ms);
  guest->set("key", "from rank 1");
  EXPECT_EQ(host->get_to_str("key"), "from rank 1");
}

TEST(ConnectStore, SingleRankNeedsNone) {
  const auto store = connect_store(Place{}, 100ms);
  store->set("key", "1");
  EXPECT_EQ(store->get_to_str("key"), "1");
}

TEST(ConnectStore, NamesAnUnreachableStore) {
  const int port = free_port();
  EXPECT_THAT(connect_error(local_place(1, port)),
              HasSubstr("127.0.0.1:" + std::to_string(port) + " (rank 1) can't be reached"));
}

TEST(ConnectStore, RefusesAnotherRunsStore) {
  const int port = free_port();
  const auto host = connect_store(local_place(0, port), 5000ms);
  Place stranger = local_place(1, port);
  stranger.run = "other";
  EXPECT_THAT(connect_error(stranger),
              HasSubstr("belongs to another run: test, 2 ranks there, other, 2 ranks here"));
  EXPECT_THAT(connect_error(local_place(0, port)), HasSubstr("can't be hosted"));
}

std::vector<int> cores_of_this_thread() {
  cpu_set_t set;
  std::vector<int> cores;
  EXPECT_EQ(sched_getaffinity(0, sizeof set, &set), 0);
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  return cores;
}

struct Share {
  std::vector<int> cores;
  int threads = 0;
};

/// What share_cores gives each of `num_ranks` threads; `before` may bind a thread first.
std::vector<Share> shares(int num_ranks, const std::function<void(int rank)>& before = {}) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<Share> result(static_cast<std::size_t>(num_ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      if (before) before(rank);
      Place place;
      place.rank = rank;
      place.world_size = num_ranks;
      share_cores(place, *store);
      result[static_cast<std::size_t>(rank)] = {cores_of_this_thread(), at::get_num_threads()};
    });
  }
  for (auto& thread : threads) thread.join();
  return result;
}

void bind_to(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  EXPECT_EQ(sched_setaffinity(0, sizeof set, &set), 0);
}

TEST(ShareCores, RanksThatShareAMaskDivideIt) {
  const auto all = cores_of_this_thread();
  for (int num_ranks : {1, 2, 3}) {
    std::vector<int> together;
    for (const Share& share : shares(num_ranks)) {
      EXPECT_FALSE(share.cores.empty());
      EXPECT_EQ(share.threads, static_cast<int>(share.cores.size()));
      together.insert(together.end(), share.cores.begin(), share.cores.end());
    }
    if (static_cast<int>(all.size()) >= num_ranks) {
      EXPECT_THAT(together, testing::UnorderedElementsAreArray(all)) << num_ranks << " ranks";
    } else {
      EXPECT_THAT(all, testing::IsSupersetOf(std::set<int>(together.begin(), together.end())));
    }
  }
}

TEST(ShareCores, RanksBoundByTheirLauncherKeepTheirCores) {
  const auto all = cores_of_this_thread();
  if (all.size() < 2) GTEST_SKIP() << "one core";
  const auto bound = shares(2, [&](int rank) { bind_to(all[static_cast<std::size_t>(rank)]); });
  EXPECT_THAT(bound[0].cores, testing::ElementsAre(all[0]));
  EXPECT_THAT(bound[1].cores, testing::ElementsAre(all[1]));
}

TEST(ShareCores, MoreRanksThanCoresHaveOneEach) {
  const auto all = cores_of_this_thread();
  for (const Share& share : shares(2, [&](int) { bind_to(all[0]); })) {
    EXPECT_THAT(share.cores, testing::ElementsAre(all[0]));
    EXPECT_EQ(share.threads, 1);
  }
}

}  // namespace
}  // namespace braid
