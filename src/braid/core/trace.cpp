// Keeps each thread's spans, and writes them as a Chrome trace.
#include "braid/core/trace.h"

#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

namespace braid::trace {
namespace {

struct Recorder {
  const char* op = nullptr;  // of the outermost Operation
  // By the literal's address: a handful of names, so a linear search is the fastest map.
  std::vector<std::pair<const char*, Totals>> totals;
  std::vector<Event> events;
  bool keep = false;

  Totals& of(const char* name) {
    for (auto& [key, value] : totals) {
      if (key == name) return value;
    }
    return totals.emplace_back(name, Totals{}).second;
  }
};

thread_local Recorder recorder;

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

Operation::Operation(const char* name) : Operation(name, resumed) {
  if (outer_ == nullptr) ++recorder.of(name).calls;
}

Operation::Operation(const char* name, Resumed) : outer_(recorder.op) {
  if (outer_ == nullptr) recorder.op = name;
}

Operation::~Operation() { recorder.op = outer_; }

Span::Span(Kind kind, const char* what) : what_(what), kind_(kind) {
  if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION)) {
    record_ = std::make_unique<at::RecordFunction>(std::move(*callbacks));
    const char* op = recorder.op;
    record_->before(op == nullptr ? fmt::format("braid::{}", what)
                                  : fmt::format("braid::{}: {}", op, what));
  }
  begin_ns_ = now_ns();
}

Span::~Span() {
  const std::int64_t end_ns = now_ns();
  Recorder& r = recorder;
  Totals& totals = r.of(r.op == nullptr ? what_ : r.op);
  totals.seconds[static_cast<std::size_t>(kind_)] += 1e-9 * static_cast<double>(end_ns - begin_ns_);
  if (r.op == nullptr) ++totals.calls;
  if (r.keep) r.events.push_back({r.op == nullptr ? what_ : r.op, what_, kind_, begin_ns_, end_ns});
}

std::map<std::string, Totals> take_totals() {
  std::map<std::string, Totals> result;
  for (auto& [name, totals] : recorder.totals) {
    Totals& sum = result[name];  // equal literals may have several addresses
    for (std::size_t kind = 0; kind < sum.seconds.size(); ++kind)
      sum.seconds[kind] += totals.seconds[kind];
    sum.calls += totals.calls;
  }
  recorder.totals.clear();
  return result;
}

void keep_events(bool on) { recorder.keep = on; }

std::vector<Event> take_events() { return std::exchange(recorder.events, {}); }

std::string chrome_events(int rank, const std::vector<Event>& events) {
  using nlohmann::json;
  std::string text;
  const auto add = [&text](const json& event) {
    if (!text.empty()) text += ",\n";
    text += event.dump();
  };
  const auto name = [&](const char* what, int lane, const std::string& value) {
    add({{"ph", "M"}, {"name", what}, {"pid", rank}, {"tid", lane}, {"args", {{"name", value}}}});
  };
  name("process_name", 0, fmt::format("rank {}", rank));
  name("thread_name", 0, "compute");
  name("thread_name", 1, "communication");
  add({{"ph", "M"},
       {"name", "process_sort_index"},
       {"pid", rank},
       {"args", {{"sort_index", rank}}}});
  constexpr const char* kKinds[] = {"compute", "copy", "wait"};
  for (const Event& event : events) {
    add({{"ph", "X"},
         {"name", std::strcmp(event.op, event.what) == 0
                      ? event.what
                      : fmt::format("{}: {}", event.op, event.what)},
         {"cat", kKinds[static_cast<int>(event.kind)]},
         {"pid", rank},
         {"tid", event.kind == Kind::compute ? 0 : 1},
         {"ts", 1e-3 * static_cast<double>(event.begin_ns)},
         {"dur", 1e-3 * static_cast<double>(event.end_ns - event.begin_ns)}});
  }
  return text;
}

void write_chrome_trace(const std::string& path, const std::vector<std::string>& ranks) {
  errno = 0;
  std::ofstream file(path, std::ios::trunc);
  file << "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [\n";
  for (std::size_t i = 0; i < ranks.size(); ++i) file << (i == 0 ? "" : ",\n") << ranks[i];
  file << "\n]}\n";
  file.close();
  if (file) return;
  const std::string reason = std::strerror(errno);
  std::error_code ignored;
  if (std::filesystem::is_regular_file(path, ignored)) std::filesystem::remove(path, ignored);
  TORCH_CHECK(false, "can't write the trace ", path, ": ", reason);
}

void write_chrome_trace(const std::string& path, int rank, const std::vector<Event>& events) {
  write_chrome_trace(path, {chrome_events(rank, events)});
}

}  // namespace braid::trace
