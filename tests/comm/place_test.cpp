// A rank's place from each launcher's variables.
#include "braid/comm/place.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "braid/core/check.h"
#include "tests/support/environment.h"

namespace braid {
namespace {

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
                           "TORCHELASTIC_RESTART_COUNT",
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
  EXPECT_FALSE(place.on_one_host());
  EXPECT_EQ(place.attempt, 0);
  const Place again = place_under(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                                   {"TORCHELASTIC_RESTART_COUNT", "2"},
                                                   {"LOCAL_WORLD_SIZE", "8"}}));
  EXPECT_TRUE(again.store_hosted);
  EXPECT_TRUE(again.on_one_host());
  EXPECT_EQ(again.attempt, 2);
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

}  // namespace
}  // namespace braid
