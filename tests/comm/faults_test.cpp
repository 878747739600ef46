// Ranks as processes: kills and freezes inside each collective, hosts without memory, ranks that fit badly together.
#include "tests/support/faults.h"

#include <gmock/gmock.h>
#include <sys/resource.h>

#include "braid/comm/collectives.h"

namespace braid {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using test::Processes;
using testing::AllOf;
using testing::HasSubstr;

struct Case {
  const char* name;
  test::Operation operation;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

std::vector<Case> cases() {
  return {
      {"all_gather",
       [](const Group& group) {
         (void)all_gather(group, at::ones({40, 50}));
       }},
      {"reduce_scatter",
       [](const Group& group) {
         (void)reduce_scatter(group, at::ones({40, 50}));
       }},
      {"small_all_reduce", [](const Group& group) { (void)all_reduce(group, at::ones({4})); }},
      {"large_all_reduce",
       [](const Group& group) {
         (void)all_reduce(group, at::ones({400, 500}));
       }},
      {"all_to_all",
       [](const Group& group) {
         (void)start_all_to_all(group, at::ones({6, 300}), {1, 2, 3},
                                std::vector<std::int64_t>(3, group.rank() + 1))
             .wait();
       }},
      {"broadcast",
       [](const Group& group) {
         (void)broadcast(group, at::ones({40, 50}), 1);
       }},
      {"barrier", [](const Group& group) { barrier(group); }},
      {"three_in_flight",
       [](const Group& group) {
         auto a = start_all_gather(group, at::ones({40, 50}));
         auto b = start_all_reduce(group, at::ones({400, 500}));
         auto c = start_reduce_scatter(group, at::ones({40, 50}));
         (void)a.wait(), (void)b.wait(), (void)c.wait();
       }},
  };
}

using CaseOnHosts = std::tuple<Case, test::HostNumbers>;
std::string name_of_case(const testing::TestParamInfo<CaseOnHosts>& info) {
  const auto& [c, hosts] = info.param;
  return fmt::format("{}{}", c.name,
                     hosts.empty() ? "" : fmt::format("_on_hosts_{}", fmt::join(hosts, "")));
}

class KilledRank : public testing::TestWithParam<CaseOnHosts> {};
INSTANTIATE_TEST_SUITE_P(Collectives, KilledRank,
                         testing::Combine(testing::ValuesIn(cases()),
                                          testing::Values(test::HostNumbers{})),
                         name_of_case);
TEST_P(KilledRank, IsNamedByAll) {
  const auto& [c, hosts] = GetParam();
  test::expect_killed_rank_is_named(c.operation, hosts);
}

std::vector<Case> cases_of_freezes() {
  std::vector<Case> some = cases();
  std::erase_if(some, [](const Case& c) {
    const std::string name = c.name;
    return name != "reduce_scatter" && name != "large_all_reduce" && name != "three_in_flight";
  });
  return some;
}

class FrozenRank : public testing::TestWithParam<CaseOnHosts> {};
INSTANTIATE_TEST_SUITE_P(Collectives, FrozenRank,
                         testing::Combine(testing::ValuesIn(cases_of_freezes()),
                                          testing::Values(test::HostNumbers{})),
                         name_of_case);
TEST_P(FrozenRank, IsNamedByAll) {
  const auto& [c, hosts] = GetParam();
  test::expect_frozen_rank_is_named(c.operation, hosts);
}

const std::vector<test::HostNumbers> kSeveralHosts{{0, 1, 2}, {0, 1, 1}, {0, 0, 1}, {0, 1, 0}};
INSTANTIATE_TEST_SUITE_P(BetweenHosts, KilledRank,
                         testing::Combine(testing::ValuesIn(cases_of_freezes()),
                                          testing::ValuesIn(kSeveralHosts)),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(BetweenHosts, FrozenRank,
                         testing::Combine(testing::ValuesIn(cases_of_freezes()),
                                          testing::ValuesIn(kSeveralHosts)),
                         name_of_case);

TEST(Faults, RankKilledBetweenStartAndWait) {
  Processes ranks(3, [](const Place& place, const auto& store) {
    const auto group = Group::create(store, "faults", place.rank, 3, {100s, true});
    auto pending = start_all_reduce(*group, at::ones({400, 500}));
    store->set("started" + std::to_string(place.rank), "1");
    if (place.rank == 1) ::pause();
    (void)pending.wait();
  });
  ranks.store().wait({"started1"});
  ranks.kill(1);
  for (const int survivor : {0, 2}) {
    const auto ended = ranks.wait(survivor, 2s);
    EXPECT_EQ(ended.exit_code, 1);
    EXPECT_THAT(ended.output, HasSubstr("all_reduce: group faults rank"));
    EXPECT_THAT(ended.output, HasSubstr("lost rank 1"));
  }
}

TEST(Faults, PendingOfALostGroupIsDroppedAtOnce) {
  // Time-outs do not add up: the first wait uses up its own, the destructors of the others see that the group is lost.
  Processes ranks(2, [](const Place& place, const auto& store) {
    const auto group = Group::create(store, "faults", place.rank, 2, {1500ms, true});
    if (place.rank == 1) ::pause();
    std::vector<Pending<at::Tensor>> started;
    for (int i = 0; i < 8; ++i) started.push_back(start_all_reduce(*group, at::ones({2})));
    (void)started[0].wait();
  });
  const auto ended = ranks.wait(0, 5s);
  EXPECT_EQ(ended.exit_code, 1) << ended.signal;
  EXPECT_THAT(ended.output, HasSubstr("rank 1 did not come within the time-out"));
}

TEST(Faults, PeerThatDoesNotComeToMakeTheGroup) {
  Processes ranks(2, [](const Place& place, const auto& store) {
    if (place.rank == 1) ::pause();
    (void)Group::create(store, "faults", place.rank, 2, {500ms, true});
  });
  const auto ended = ranks.wait(0, 5s);
  EXPECT_EQ(ended.exit_code, 1) << ended.signal;
  EXPECT_THAT(ended.output,
              HasSubstr("group faults rank 0: rank 1 did not come to make the group"));
}

TEST(Faults, HostWithoutMemoryIsAnErrorOfAllRanksAndNotASignal) {
  ::setenv("BRAID_SLOT_BYTES", std::to_string(std::size_t{1} << 40).c_str(), 1);
  Processes ranks(2, [](const Place& place, const auto& store) {
    const auto group = Group::create(store, "faults", place.rank, 2, {20s, true});
    const std::int64_t more_than_all = 2 * ::sysconf(_SC_PHYS_PAGES) * ::sysconf(_SC_PAGESIZE);
    if (place.rank == 0)
      (void)start_all_reduce(*group, at::ones({1}, at::kByte).expand({more_than_all}));
    else
      barrier(*group);
  });
  ::unsetenv("BRAID_SLOT_BYTES");
  for (const int rank : {0, 1}) {
    const auto ended = ranks.wait(rank, 10s);
    EXPECT_EQ(ended.exit_code, 1) << ended.signal;
    EXPECT_THAT(ended.output, AllOf(HasSubstr("rank 0 of group faults can't take part"),
                                    HasSubstr("bytes more of shared memory")));
  }
}

/// Limits one resource of this process from here on.
void limit(__rlimit_resource resource, rlim_t to) {
  const rlimit value{to, to};
  ASSERT_EQ(::setrlimit(resource, &value), 0);
}

TEST(Faults, LimitsOfAProcessAreNamed) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need address space";
#endif
  Processes ranks(2, [](const Place& place, const auto& store) {
    if (place.rank == 0) limit(RLIMIT_AS, rlim_t{64} << 30);
    if (place.rank == 1) limit(RLIMIT_FSIZE, 1 << 30);
    (void)Group::create(store, "faults", place.rank, 2, {2s, true});
  });
  const auto space = ranks.wait(0, 10s), files = ranks.wait(1, 10s);
  EXPECT_EQ(space.exit_code, 1) << space.signal;
  EXPECT_THAT(space.output, HasSubstr("bytes of shared memory: Cannot allocate memory. HINT"));
  EXPECT_EQ(files.exit_code, 1) << files.signal;
  EXPECT_THAT(files.output, HasSubstr("ulimit -f"));
}

TEST(Faults, RanksWithOtherSlotSizesAreTold) {
  if (const char* rank = std::getenv("RANK"); rank != nullptr)
    ::setenv("BRAID_SLOT_BYTES", *rank == '0' ? "1048576" : "2097152", 1);
  Processes ranks(2, [](const Place& place, const auto& store) {
    (void)Group::create(store, "faults", place.rank, 2, {20s, true});
  });
  const auto first = ranks.wait(0, 10s), second = ranks.wait(1, 10s);
  EXPECT_EQ(first.exit_code, 2);
  EXPECT_THAT(first.output, HasSubstr("ranks 0 and 1 differ in their bytes of shared memory"));
  EXPECT_EQ(first.output.substr(first.output.find("group faults")),
            second.output.substr(second.output.find("group faults")));
}

}  // namespace
}  // namespace braid
