// An operation in a loop on three processes, one of which is killed or frozen at some moment of it.
#pragma once

#include <ATen/Parallel.h>
#include <gmock/gmock.h>

#include "braid/comm/group.h"
#include "tests/support/processes.h"
#include "tests/support/ranks.h"

namespace braid::test {

using Operation = std::function<void(const Group& group)>;

/// What every rank runs: the operation, without end; "ready<rank>" in the store after the first ones.
inline Processes::Body loop_of(const Operation& operation, const GroupOptions& options) {
  return [=](const Place& place, const auto& store) {
    at::set_num_threads(1);
    const auto group = Group::create(store, "faults", place.rank, place.world_size, options);
    for (std::int64_t i = 0;; ++i) {
      operation(*group);
      if (i == 10) store->set("ready" + std::to_string(place.rank), "1");
    }
  };
}

inline void wait_until_ready(Processes& ranks) {
  ranks.store().wait({"ready0", "ready1", "ready2"}, std::chrono::seconds(60));
}

/// Both survivors end with the loss of rank 1, within 2 s; the time-out is much later.
inline void expect_killed_rank_is_named(const Operation& operation, const HostNumbers& hosts = {}) {
  Processes ranks(3, loop_of(operation, on_hosts(hosts, std::chrono::seconds(100))));
  wait_until_ready(ranks);
  ranks.kill(1);
  for (const int survivor : {0, 2}) {
    const Ended ended = ranks.wait(survivor, std::chrono::seconds(2));
    EXPECT_EQ(ended.exit_code, 1) << "rank " << survivor << ": signal " << ended.signal;
    EXPECT_THAT(ended.output, testing::HasSubstr("lost rank 1")) << "rank " << survivor;
  }
}

/// Both survivors name rank 1 at the time-out; rank 1, awake again, learns that it was given up.
inline void expect_frozen_rank_is_named(const Operation& operation, const HostNumbers& hosts = {}) {
  Processes ranks(3, loop_of(operation, on_hosts(hosts, std::chrono::seconds(1))));
  wait_until_ready(ranks);
  ranks.freeze(1);
  std::string outputs;
  for (const int survivor : {0, 2}) {
    const Ended ended = ranks.wait(survivor, std::chrono::seconds(5));
    EXPECT_EQ(ended.exit_code, 1) << "rank " << survivor << ": signal " << ended.signal;
    EXPECT_THAT(ended.output,
                testing::ContainsRegex(
                    "rank 1( .of the host with ranks [0-9, ]+.)? did not come within the "
                    "time-out|lost rank 1"));
    outputs += ended.output;
  }
  ranks.thaw(1);
  const Ended ended = ranks.wait(1, std::chrono::seconds(4));
  EXPECT_EQ(ended.exit_code, 1) << ended.signal;
  EXPECT_THAT(ended.output, testing::HasSubstr("in vain for this rank")) << outputs;
}

}  // namespace braid::test
