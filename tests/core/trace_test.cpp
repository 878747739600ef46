// Spans: totals by operation and thread, events, PyTorch's profiler, the Chrome trace.
#include "braid/core/trace.h"

#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

namespace braid::trace {
namespace {

using nlohmann::json;

void busy(std::chrono::microseconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < end) {
  }
}

TEST(Trace, TotalsByKindOfTheOutermostOperation) {
  take_totals();
  for (int i = 0; i < 3; ++i) {
    Operation outer("outer");
    {
      Operation inner("inner");
      Span span(Kind::compute, "matmul");
      busy(std::chrono::microseconds(300));
    }
    Span span(Kind::wait, "wait");
    busy(std::chrono::microseconds(100));
  }
  { Span span(Kind::copy, "alone"); }
  const auto totals = take_totals();
  ASSERT_EQ(totals.size(), 2u);
  const Totals& outer = totals.at("outer");
  EXPECT_EQ(outer.calls, 3);
  EXPECT_GE(outer.compute_s(), 0.0009);
  EXPECT_GE(outer.exposed_s(), 0.0003);
  EXPECT_EQ(outer.seconds[static_cast<int>(Kind::copy)], 0);
  EXPECT_EQ(totals.at("alone").calls, 1);
  EXPECT_EQ(totals.at("alone").compute_s(), 0);
  EXPECT_TRUE(take_totals().empty());
}

TEST(Trace, TheOperationEndsWhenAnExceptionPasses) {
  take_totals();
  try {
    Operation operation("failing");
    throw std::runtime_error("x");
  } catch (const std::runtime_error&) {
  }
  {
    Operation operation("next");
    Span span(Kind::compute, "matmul");
  }
  EXPECT_EQ(take_totals().at("next").calls, 1);
}

TEST(Trace, EachThreadRecordsForItself) {
  take_totals();
  std::thread([] { Span span(Kind::compute, "theirs"); }).join();
  EXPECT_TRUE(take_totals().empty());
}

TEST(Trace, EventsAreKeptOnlyOnRequestInOrder) {
  take_events();
  { Span span(Kind::compute, "unseen"); }
  keep_events(true);
  {
    Operation operation("op");
    Span span(Kind::wait, "wait");
  }
  {
    Operation operation("op");
    Span span(Kind::compute, "matmul");
  }
  keep_events(false);
  { Span span(Kind::compute, "unseen"); }
  const auto events = take_events();
  ASSERT_EQ(events.size(), 2u);
  EXPECT_STREQ(events[0].op, "op");
  EXPECT_STREQ(events[0].what, "wait");
  EXPECT_EQ(events[0].kind, Kind::wait);
  EXPECT_LE(events[0].begin_ns, events[0].end_ns);
  EXPECT_LE(events[0].end_ns, events[1].begin_ns);
  EXPECT_TRUE(take_events().empty());
  take_totals();
}

TEST(Trace, SpansReachRecordFunction) {
  static std::vector<std::string> seen;
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(
      [](const at::RecordFunction& fn) -> std::unique_ptr<at::ObserverContext> {
        seen.emplace_back(fn.name());
        return nullptr;
      }));
  {
    Operation operation("op");
    Span span(Kind::compute, "matmul");
  }
  { Span span(Kind::compute, "norm"); }
  at::removeCallback(handle);
  EXPECT_EQ(seen, (std::vector<std::string>{"braid::op: matmul", "braid::norm"}));
  take_totals();
}

TEST(Trace, WritesAllRanksWithALaneForComputeAndOneForCommunication) {
  const auto path = std::filesystem::temp_directory_path() /
                    ("braid_trace_" + std::to_string(getpid()) + ".json");
  const std::vector<Event> events = {
      {"op", "matmul", Kind::compute, 5'000'000'001'500, 5'000'000'004'000},
      {"op", "publish", Kind::copy, 5'000'000'004'000, 5'000'000'005'000},
      {"alone", "alone", Kind::wait, 5'000'000'005'000, 5'000'000'009'000}};
  write_chrome_trace(path, {chrome_events(0, events), chrome_events(1, {})});
  const json trace = json::parse(std::ifstream(path));
  std::filesystem::remove(path);
  std::map<int, std::string> processes;
  std::map<std::pair<int, int>, std::string> lanes;
  std::vector<json> spans;
  for (const json& event : trace.at("traceEvents")) {
    if (event["name"] == "process_name") processes[event["pid"]] = event["args"]["name"];
    if (event["name"] == "thread_name") lanes[{event["pid"], event["tid"]}] = event["args"]["name"];
    if (event["ph"] == "X") spans.push_back(event);
  }
  EXPECT_EQ(processes, (std::map<int, std::string>{{0, "rank 0"}, {1, "rank 1"}}));
  EXPECT_EQ(lanes.at({1, 0}), "compute");
  EXPECT_EQ(lanes.at({1, 1}), "communication");
  ASSERT_EQ(spans.size(), 3u);
  EXPECT_EQ(spans[0]["name"], "op: matmul");
  EXPECT_EQ(spans[0]["tid"], 0);
  EXPECT_EQ(spans[0]["ts"], 5'000'000'001.5);
  EXPECT_EQ(spans[0]["dur"], 2.5);
  EXPECT_EQ(spans[1]["tid"], 1);
  EXPECT_EQ(spans[1]["cat"], "copy");
  EXPECT_EQ(spans[2]["name"], "alone");
  EXPECT_EQ(spans[2]["tid"], 1);
}

TEST(Trace, AnUnwritableTraceNamesItsPath) {
  try {
    write_chrome_trace("/nonexistent/trace.json", 0, {});
    FAIL();
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("/nonexistent/trace.json: No such file"),
              std::string::npos);
  }
}

}  // namespace
}  // namespace braid::trace
