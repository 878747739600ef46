// Groups that come and go leave nothing in their processes: descriptors, threads, mappings, shared memory.
#include <sched.h>

#include <filesystem>
#include <fstream>

#include "braid/comm/collectives.h"
#include "tests/support/folders.h"
#include "tests/support/processes.h"
#include "tests/support/ranks.h"

namespace braid {
namespace {

struct Resources {
  std::int64_t descriptors, threads, mappings, shared_kilobytes;

  static Resources now() {
    const auto entries = [](const char* folder) {
      return std::distance(std::filesystem::directory_iterator(folder), {});
    };
    std::ifstream maps("/proc/self/maps"), status("/proc/self/status");
    std::int64_t shared = 0;
    for (std::string line; std::getline(status, line);)
      if (line.starts_with("RssShmem:")) shared = std::stoll(line.substr(9));
    return {entries("/proc/self/fd"), entries("/proc/self/task"),
            std::count(std::istreambuf_iterator<char>(maps), {}, '\n'), shared};
  }
};

/// A group that is made, used with changing sizes, and dropped with an operation still to be waited for.
void use_group(const c10::intrusive_ptr<c10d::Store>& store, const Place& place, int number,
               bool shared_memory) {
  const auto group = Group::create(store, fmt::format("group{}", number), place.rank,
                                   place.world_size, {std::chrono::seconds(20), shared_memory});
  for (const std::int64_t rows : {1, 4000, 0, 7})
    EXPECT_EQ(all_reduce(*group, at::ones({rows, 100})).sum().item<float>(),
              static_cast<float>(rows * 100 * place.world_size));
  auto dropped = start_all_gather(*group, at::ones({10, 10}));
}

void expect_no_growth(int num_groups, bool shared_memory) {
  test::run_ranks_as_processes(2, [=](const Place& place, const auto& store) {
    at::set_num_threads(1);
    int number = 0;
    while (number < 5) use_group(store, place, number++, shared_memory);
    const Resources before = Resources::now();
    while (number < 5 + num_groups) use_group(store, place, number++, shared_memory);
    const Resources after = Resources::now();
    EXPECT_EQ(after.descriptors, before.descriptors);
    EXPECT_EQ(after.threads, before.threads);
    EXPECT_LE(after.mappings, before.mappings + 8);  // malloc has its own
    EXPECT_LE(after.shared_kilobytes, before.shared_kilobytes + 1000);
  });
}

TEST(Resources, SharedMemoryGroupsLeaveNothing) { expect_no_growth(200, true); }

TEST(Resources, NetworkGroupsLeaveNothing) { expect_no_growth(30, false); }

TEST(Resources, ThreadsOfGlooRunInTurn) {
  test::run_ranks_as_processes(2, [](const Place& place, const auto& store) {
    const auto classes_of_gloo = [] {
      std::vector<int> classes;
      for (const auto& task : std::filesystem::directory_iterator("/proc/self/task"))
        if (test::read_text(task.path() / "comm") == "gloo_tcp_loop\n")
          classes.push_back(::sched_getscheduler(std::stoi(task.path().filename())));
      return classes;
    };
    GroupOptions options{std::chrono::seconds(20), /*shared_memory=*/false};
    {
      const auto group = Group::create(store, "braid's", place.rank, place.world_size, options);
      EXPECT_EQ(classes_of_gloo(), std::vector<int>{SCHED_BATCH});
      EXPECT_EQ(::sched_getscheduler(0), SCHED_OTHER);
      barrier(*group);
    }
    options.engine_collectives = true;
    const auto group = Group::create(store, "engine's", place.rank, place.world_size, options);
    barrier(*group);
    EXPECT_EQ(classes_of_gloo(), std::vector<int>{SCHED_OTHER});
    barrier(*group);
  });
}

TEST(Resources, SlotsAreUsedAgain) {
  test::run_ranks_as_processes(2, [](const Place& place, const auto& store) {
    at::set_num_threads(1);
    const auto group = Group::create(store, "group", place.rank, 2);
    const auto use = [&](int times) {
      for (int i = 0; i < times; ++i) {
        (void)all_reduce(*group, at::ones({1 + 997 * i % 5000, 100}));  // up to 2 MB
        (void)all_gather(*group, at::ones({1, 3}));
      }
    };
    use(60);
    const Resources before = Resources::now();
    use(2000);
    EXPECT_LE(Resources::now().shared_kilobytes, before.shared_kilobytes + 4000);
  });
}

}  // namespace
}  // namespace braid
