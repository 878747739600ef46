// Spans of compute, copies and waits: totals per operation, and the events behind a Chrome trace.
//
// Each thread records for itself (a rank is a process, or in tests a thread; PyTorch's engine runs
// a CPU backward in the thread that called it). Every span is also a RECORD_FUNCTION, so that
// PyTorch's profiler shows it.
//
// NOTE [exposed]: exposed communication = wait + copy, where copy is what publishes, gathers or
// stores payload for the communication's sake. A reduction's own sums count as copy too: without
// communication they would not be there.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace at {
struct RecordFunction;
}

namespace braid::trace {

enum class Kind : std::uint8_t { compute, copy, wait };

struct Totals {
  std::array<double, 3> seconds{};  // by Kind
  std::int64_t calls = 0;

  Totals& operator+=(const Totals& other) {
    for (std::size_t kind = 0; kind < seconds.size(); ++kind) seconds[kind] += other.seconds[kind];
    calls += other.calls;
    return *this;
  }
  double compute_s() const { return seconds[0]; }
  double exposed_s() const { return seconds[1] + seconds[2]; }
};

struct Event {
  const char* op;    // string literal: the operation, e.g. "all_gather_matmul"
  const char* what;  // string literal: the step, e.g. "matmul"
  Kind kind;
  std::int64_t begin_ns, end_ns;  // steady clock
};

struct Resumed {};
inline constexpr Resumed resumed;  // what was started before, so that it is one call

/// Names the operation that the spans of this thread belong to, until destroyed; the outermost one wins.
class Operation {
 public:
  explicit Operation(const char* name);
  Operation(const char* name, Resumed);
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

 private:
  const char* outer_;
};

/// One step of the current operation: from construction to destruction. Spans don't nest. Outside
/// of every operation a span is one by itself, named `what`.
class Span {
 public:
  Span(Kind kind, const char* what);
  ~Span();
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  const char* what_;
  Kind kind_;
  std::int64_t begin_ns_;
  std::unique_ptr<at::RecordFunction> record_;  // null unless a profiler listens
};

/// Totals of this thread since the last call, by operation; resets them.
std::map<std::string, Totals> take_totals();

/// Starts or stops keeping events of this thread.
void keep_events(bool on);
/// The events of this thread since they were last taken.
std::vector<Event> take_events();

/// The events of one rank as the text that write_chrome_trace takes, so that ranks can send it to
/// the one that writes. In Perfetto: process `rank N`, lane 0 compute, lane 1 communication (copies and waits).
std::string chrome_events(int rank, const std::vector<Event>& events);

/// Writes a Chrome trace (JSON, opens in Perfetto) of one rank or of several: texts of
/// chrome_events, one a rank. Ranks of one host share a clock; those of others are shifted by the
/// difference of the hosts' uptimes. Errors: c10::Error naming the path when it can't be written.
void write_chrome_trace(const std::string& path, const std::vector<std::string>& ranks);
void write_chrome_trace(const std::string& path, int rank, const std::vector<Event>& events);

}  // namespace braid::trace
