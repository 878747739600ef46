// How ranks meet: the store, its errors, what they compare there, the address they listen on.
#include "braid/comm/join.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "braid/comm/reach.h"
#include "braid/comm/spawn.h"

namespace braid {
namespace {

using std::chrono_literals::operator""ms;
using testing::HasSubstr;

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

TEST(ConnectStore, KnowsWhatIsNoStore) {
  const auto silent = listen_tcp(0, Listening::loopback);
  const int port = port_of(silent);
  const std::string where = "127.0.0.1:" + std::to_string(port) + " (rank 1)";
  EXPECT_THAT(connect_error(local_place(1, port)),
              testing::AllOf(HasSubstr(where), HasSubstr("what listens there is no store")));
  EXPECT_THAT(connect_error(local_place(0, port)),
              HasSubstr("can't listen on port " + std::to_string(port) +
                        ": Address already in use; there is another program"));
}

TEST(ConnectStore, NamesAnUnknownHost) {
  Place place = local_place(1, 4711);
  place.master_addr = "no-such-host.invalid";
  EXPECT_THAT(connect_error(place),
              testing::AllOf(HasSubstr("no-such-host.invalid:4711"), HasSubstr("is not known")));
}

TEST(ConnectStore, WaitsForAStoreThatComesLater) {
  const int port = free_port();
  std::thread guest(
      [&] { EXPECT_EQ(connect_store(local_place(1, port), 5000ms)->add("key", 1), 1); });
  std::this_thread::sleep_for(600ms);
  const auto host = connect_store(local_place(0, port), 5000ms);
  guest.join();
}

// Two runs that nothing tells apart: the second one's ranks are there already.
TEST(ConnectStore, RefusesARankThatIsThere) {
  const int port = free_port();
  const auto host = connect_store(local_place(0, port), 5000ms);
  const auto stranger = open_store("127.0.0.1", port, std::chrono::steady_clock::now() + 5000ms);
  stranger->set("braid/rank/1", "pid 5 on elsewhere");
  EXPECT_THAT(
      connect_error(local_place(1, port)),
      testing::AllOf(
          HasSubstr(
              "belongs to another run, or to a program that ran before, or RANK is given twice"),
          HasSubstr("rank 1 is pid 5 on elsewhere there, pid ")));
  EXPECT_THAT(connect_error(local_place(0, port)),
              HasSubstr("there is another run's store: test, 2 ranks"));
}

TEST(ConnectStore, AnAttemptMeetsNothingOfTheOneBefore) {
  const int port = free_port();
  const auto host = connect_store(local_place(0, port), 5000ms);
  host->set("key", "old");
  Place second = local_place(1, port);
  second.attempt = 1;
  EXPECT_FALSE(connect_store(second, 5000ms)->check({"key"}));
}

/// Runs fn(place) on threads of `num_ranks` ranks with one store; gives each one's error, or "".
std::vector<std::string> errors_of(
    int num_ranks, const std::function<void(const Place& place, c10d::Store& store)>& fn) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> errors(static_cast<std::size_t>(num_ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      Place place;
      place.rank = rank;
      place.world_size = num_ranks;
      try {
        fn(place, *store);
      } catch (const c10::ValueError& error) {
        errors[static_cast<std::size_t>(rank)] = error.what_without_backtrace();
      } catch (const c10::DistBackendError& error) {
        errors[static_cast<std::size_t>(rank)] =
            std::string("lost: ") + error.what_without_backtrace();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return errors;
}

TEST(CheckSame, NamesBothRanksAndValuesOnAllRanks) {
  const auto errors = errors_of(3, [](const Place& place, c10d::Store& store) {
    check_same(place, store, "first", {{"--lr", 0.5}, {"--bf16", true}}, 5000ms);
    check_same(place, store, "second", {{"--bf16", true}, {"--lr", place.rank == 2 ? 0.25 : 0.5}},
               5000ms);
  });
  EXPECT_THAT(errors, testing::Each("--lr of rank 0 is 0.5, of rank 2 0.25"));
}

TEST(CheckSame, NamesAllThatDiffers) {
  const auto errors = errors_of(3, [](const Place& place, c10d::Store& store) {
    check_same(place, store, "topic", {{"a", 0}, {"b", place.rank}, {"c", 10 * place.rank}},
               5000ms);
  });
  EXPECT_THAT(errors,
              testing::Each("b of rank 0 is 0, of rank 1 1; c of rank 0 is 0, of rank 1 10"));
}

TEST(CheckSame, ManyMissingRanksAreCounted) {
  const auto errors = errors_of(20, [](const Place& place, c10d::Store& store) {
    if (place.rank == 0) check_same(place, store, "topic", {{"a", 1}}, 300ms);
  });
  EXPECT_EQ(errors[0],
            "lost: ranks 1, 2, 3, 4, 5, 6, 7, 8 and 11 more of 20 did not come within 0.3 s");
}

TEST(CheckSame, AFactThatARankLacks) {
  const auto errors = errors_of(2, [](const Place& place, c10d::Store& store) {
    nlohmann::json facts{{"a", 1}};
    if (place.rank == 0) facts["new flag"] = 2;
    check_same(place, store, "topic", facts, 5000ms);
  });
  EXPECT_THAT(errors, testing::Each("new flag of rank 0 is 2, of rank 1 null"));
}

TEST(CheckSame, NamesTheRanksThatDoNotCome) {
  const auto errors = errors_of(4, [](const Place& place, c10d::Store& store) {
    if (place.rank % 2 == 0) check_same(place, store, "topic", {{"a", 1}}, 300ms);
  });
  const std::string late = "lost: ranks 1, 3 of 4 did not come within 0.3 s";
  EXPECT_THAT(errors, testing::ElementsAre(late, "", late, ""));
}

TEST(CheckSame, NamesRankZeroToo) {
  const auto errors = errors_of(2, [](const Place& place, c10d::Store& store) {
    if (place.rank == 1) check_same(place, store, "topic", {{"a", 1}}, 300ms);
  });
  EXPECT_EQ(errors[1], "lost: rank 0 of 2 did not come within 0.3 s");
}

// Rank 0 hosts the store: it stays until the others know why the run ends.
TEST(CheckSame, TheOthersHearWhatRankZeroFinds) {
  const int port = free_port();
  std::vector<std::string> errors(2);
  const auto rank = [&](int number) {
    const Place place = local_place(number, port);
    try {
      const auto store = connect_store(place, 5000ms);
      check_same(place, *store, "topic", {{"a", number}}, 5000ms);
    } catch (const c10::Error& error) {
      errors[static_cast<std::size_t>(number)] = error.what_without_backtrace();
    }
  };
  std::thread other([&] { rank(1); });
  rank(0);
  other.join();
  EXPECT_THAT(errors, testing::Each("a of rank 0 is 0, of rank 1 1"));
}

TEST(CheckSame, RankZeroStaysUntilItIsHeard) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  std::atomic<bool> left{false};
  std::thread rank([&] {
    EXPECT_THROW(check_same(local_place(0, 4711), *store, "topic", {{"a", 0}}, 5000ms),
                 c10::ValueError);
    left = true;
  });
  store->set("braid/topic/1", "{\"a\": 1}");
  store->wait({"braid/topic/verdict"});
  std::this_thread::sleep_for(300ms);
  EXPECT_FALSE(left);
  store->add("braid/topic/heard", 1);
  rank.join();
}

std::vector<std::string> reach_errors(int num_ranks,
                                      const std::function<bool(int rank)>& takes_part = {}) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  store->setTimeout(500ms);
  return errors_of(num_ranks, [&](Place place, c10d::Store&) {
    place.local_world_size = num_ranks;
    if (!takes_part || takes_part(place.rank)) check_reach(place, store);
  });
}

TEST(CheckReach, RanksThatListenAreReached) { EXPECT_THAT(reach_errors(3), testing::Each("")); }

TEST(CheckReach, NamesARankThatDoesNotCome) {
  EXPECT_THAT(reach_errors(3, [](int rank) { return rank != 1; }),
              testing::ElementsAre("lost: rank 1 of 3 did not come within 0.5 s", "",
                                   "lost: rank 1 of 3 did not come within 0.5 s"));
}

TEST(CheckReach, NamesWhoIsNotReachedOnAllRanks) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  store->setTimeout(500ms);
  // Rank 0 is elsewhere: nothing listens here at its port.
  store->set("braid/listens/0", std::to_string(free_port()) + " 127.0.0.1");
  store->set("braid/reaches/0", "");
  const auto errors = errors_of(3, [&](Place place, c10d::Store&) {
    place.local_world_size = 3;
    if (place.rank > 0) check_reach(place, store);
  });
  EXPECT_EQ(errors[2], errors[1]);
  EXPECT_THAT(errors[1],
              testing::AllOf(HasSubstr("rank 1 can't reach rank 0 at 127.0.0.1:"),
                             HasSubstr("nothing listens there"), HasSubstr("LOCAL_WORLD_SIZE")));
}

TEST(JoinRun, KnowsOtherCode) {
  const int port = free_port();
  std::string error;
  std::thread rank([&] {
    try {
      (void)join_run(local_place(1, port), 5000ms);
    } catch (const c10::ValueError& caught) {
      error = caught.what_without_backtrace();
    }
  });
  const Place place = local_place(0, port);
  const auto store = connect_store(place, 5000ms);
  EXPECT_THROW(check_same(place, *store, "code",
                          {{"braid", "0.0.1 (build 12)"}, {"libtorch", "1.0"}}, 5000ms),
               c10::ValueError);
  rank.join();
  EXPECT_THAT(error, HasSubstr("braid of rank 0 is \"0.0.1 (build 12)\", of rank 1 \"0."));
}

/// A rank that is alone on its host, of two.
Place alone_at(const std::string& master_addr) {
  Place place = local_place(1, 4711);
  place.local_world_size = 1;
  place.local_rank = 0;
  place.master_addr = master_addr;
  return place;
}

TEST(ListeningAddress, LoopbackOnlyWhereAllRanksAreOnOneHost) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  store->setTimeout(100ms);
  EXPECT_EQ(listening_address(local_place(1, 4711), store), "127.0.0.1");
  // Nobody knows of another host: all are on this one, as braid launch may start them by host.
  EXPECT_EQ(listening_address(alone_at("127.0.0.1"), store), "127.0.0.1");
}

TEST(ListeningAddress, FollowsTheRouteToAnotherHostFromLoopback) {
  const std::string away = address_towards("192.0.2.1");  // never sent to
  if (away.empty() || is_loopback(away)) GTEST_SKIP() << "no network";
  EXPECT_EQ(listening_address(alone_at("192.0.2.1"), c10::make_intrusive<c10d::HashStore>()), away);
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  store->set("braid/other host", "192.0.2.1");
  const auto of_group = c10::make_intrusive<c10d::PrefixStore>(
      "tp", c10::make_intrusive<c10d::PrefixStore>("attempt 1", store));
  EXPECT_EQ(listening_address(alone_at("127.0.1.1"), of_group), away);
}

TEST(Sockets, OwnAddresses) {
  EXPECT_EQ(own_address("lo"), "127.0.0.1");
  EXPECT_EQ(own_address("127.0.0.1"), "127.0.0.1");
  EXPECT_EQ(own_address("eth77"), "");
  EXPECT_EQ(own_address("192.0.2.1"), "");
  EXPECT_TRUE(is_loopback("127.0.1.1"));
  EXPECT_TRUE(is_loopback("::1"));
  EXPECT_FALSE(is_loopback("10.77.0.1"));
}

}  // namespace
}  // namespace braid
