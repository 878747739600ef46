// The report: metrics lines, resuming, plain lines, the bar on a terminal, the table.
#include "braid/train/report.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "tests/support/errors.h"
#include "tests/support/folders.h"
#include "tests/support/limits.h"

namespace braid {
namespace {

using nlohmann::json;
using test::error_of;
using test::TemporaryFolder;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

IterationMetrics metrics_of(std::int64_t iteration) {
  IterationMetrics m;
  m.iteration = iteration;
  m.loss = 3 + 0.5 * static_cast<double>(iteration);
  m.grad_norm = 1.25;
  m.lr = 3e-4;
  m.tokens_per_s = 12345;
  m.tflop_s_per_rank = 0.5;
  m.step_s = 0.1;
  m.overlap = {.compute_s = 0.08, .comm_s = 0.04, .hidden_s = 0.03, .exposed_s = 0.01};
  return m;
}

std::vector<std::int64_t> iterations_in(const std::string& path) {
  std::vector<std::int64_t> iterations;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);)
    iterations.push_back(json::parse(line)["iteration"]);
  return iterations;
}

// A report that writes into a file.
struct InFile {
  explicit InFile(ReportOptions options) {
    options.out = out;
    report.emplace(std::move(options));
  }
  ~InFile() { std::fclose(out); }
  std::string text() {
    std::rewind(out);
    std::string result;
    for (int c; (c = std::fgetc(out)) != EOF;) result += static_cast<char>(c);
    return result;
  }
  std::FILE* out = std::tmpfile();
  std::optional<Report> report;
};

TEST(Report, MetricsLinesHaveEveryNumberAndNullForThoseThatAreNone) {
  IterationMetrics m = metrics_of(7);
  json line = json::parse(metrics_line(m));
  EXPECT_EQ(line, json({{"iteration", 7},
                        {"loss", 6.5},
                        {"grad_norm", 1.25},
                        {"lr", 3e-4},
                        {"tokens_per_s", 12345.0},
                        {"tflop_s_per_rank", 0.5},
                        {"step_s", 0.1},
                        {"compute_s", 0.08},
                        {"comm_s", 0.04},
                        {"hidden_comm_s", 0.03},
                        {"exposed_comm_s", 0.01}}));
  m.loss = std::nan("");
  m.grad_norm = INFINITY;
  m.validation_loss = 2.5;
  line = json::parse(metrics_line(m));
  EXPECT_TRUE(line["loss"].is_null());
  EXPECT_TRUE(line["grad_norm"].is_null());
  EXPECT_EQ(line["validation_loss"], 2.5);
}

TEST(Report, AResumedRunDropsTheLinesThatItDoesAgain) {
  const TemporaryFolder folder;
  const std::string path = folder / "metrics.jsonl";
  {
    InFile first({.metrics_path = path, .num_iterations = 6});
    for (int i = 1; i <= 4; ++i) {
      first.report->iteration(metrics_of(i));
      EXPECT_EQ(iterations_in(path).size(), static_cast<std::size_t>(i));  // flushed
    }
  }
  test::write_text(path, test::read_text(path) +
                             "[]\n{\"iteration\": 5, \"lo");  // killed in the middle of a line
  {
    InFile second({.metrics_path = path, .loaded_iteration = 3, .num_iterations = 6});
    EXPECT_THAT(iterations_in(path), ElementsAre(1, 2, 3));
    for (int i = 4; i <= 6; ++i) second.report->iteration(metrics_of(i));
  }
  EXPECT_THAT(iterations_in(path), ElementsAre(1, 2, 3, 4, 5, 6));
  InFile fresh({.metrics_path = path, .num_iterations = 6});
  EXPECT_THAT(iterations_in(path), ElementsAre());
}

TEST(Report, AnUnwritableMetricsFileIsAnErrorAtStartAndAWarningLater) {
  const TemporaryFolder folder;
  EXPECT_THAT(error_of<c10::ValueError>(
                  [&] { Report report({.metrics_path = folder / "none/metrics.jsonl"}); }),
              HasSubstr("none/metrics.jsonl: No such file"));
  EXPECT_THAT(error_of<c10::ValueError>([&] { Report report({.metrics_path = folder.path()}); }),
              HasSubstr("it is a folder"));

  const std::string path = folder / "metrics.jsonl";
  InFile full({.metrics_path = path, .num_iterations = 9, .log_interval = 100});
  full.report->iteration(metrics_of(1));
  std::optional<test::FileSizeLimit> limit(300);
  full.report->iteration(metrics_of(2));
  full.report->iteration(metrics_of(3));
  limit.reset();
  full.report->iteration(metrics_of(4));
  const std::string text = full.text();
  EXPECT_THAT(text, HasSubstr("warning: can't write " + path + ": File too large"));
  EXPECT_EQ(text.find("warning"), text.rfind("warning"));
}

TEST(Report, PlainLinesEveryIntervalAndAtTheEnd) {
  InFile file({.num_iterations = 5, .log_interval = 2});
  for (int i = 1; i <= 5; ++i) {
    IterationMetrics m = metrics_of(i);
    if (i == 4) m.validation_loss = 2.125;
    file.report->iteration(m);
  }
  file.report->finish({});
  const std::string text = file.text();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 4);
  EXPECT_THAT(
      text, HasSubstr(" iteration 2/5 | loss 3.7500 | grad norm 1.250 | lr 3.000e-04 | 100.0 ms | "
                      "12345 tokens/s | 0.5000 TFLOP/s per rank | comm 40.0 ms, 75 % hidden | "));
  EXPECT_THAT(text, HasSubstr(" iteration 4/5 | loss 4.7500"));  // the mean since the last line
  EXPECT_THAT(text, HasSubstr(" iteration 5/5 | loss 5.5000"));
  EXPECT_THAT(text, HasSubstr(" validation loss at iteration 4: 2.1250\n"));
  EXPECT_THAT(text, Not(HasSubstr("\r")));
}

TEST(Report, OtherRanksAreSilentAndWriteNothing) {
  const TemporaryFolder folder;
  InFile file({.enabled = false, .metrics_path = folder / "metrics.jsonl", .num_iterations = 1});
  file.report->iteration(metrics_of(1));
  file.report->note("note");
  file.report->finish({{"all_gather_matmul", 1, {}}});
  EXPECT_EQ(file.text(), "");
  EXPECT_THAT(test::names_in(folder.path()), ElementsAre());
}

TEST(Report, TheBarFitsEveryWidth) {
  const auto line = [](int width) { return progress_line(20, 100, 2.34567, 12345, 3723, width); };
  EXPECT_EQ(line(200),
            "[######........................] 20/100 loss 2.3457 | 1:02:03 left | 12.3k tokens/s");
  EXPECT_EQ(line(60), "[#......] 20/100 loss 2.3457 | 1:02:03 left | 12.3k tokens/s");
  EXPECT_EQ(line(50), "20/100 loss 2.3457 | 1:02:03 left | 12.3k tokens/s");
  EXPECT_EQ(line(11), "loss 2.3457");
  EXPECT_EQ(line(0), "");
  for (int width = 0; width < 120; ++width)
    EXPECT_LE(line(width).size(), static_cast<std::size_t>(width));
  EXPECT_THAT(progress_line(0, 0, std::nan(""), INFINITY, INFINITY, 80),
              HasSubstr("loss nan | ? left | ? tokens/s"));
}

TEST(Report, ATerminalGetsOneLineThatIsRedrawn) {
  int controller = -1, terminal = -1;
  winsize size{};
  size.ws_row = 24;
  size.ws_col = 60;
  ASSERT_EQ(openpty(&controller, &terminal, nullptr, nullptr, &size), 0);
  setenv("TERM", "xterm", 1);
  std::FILE* out = fdopen(terminal, "w");
  {
    Report report({.num_iterations = 3, .log_interval = 1, .out = out});
    report.iteration(metrics_of(1));
    report.note("a note");
    report.iteration(metrics_of(3));
    report.finish({{"all_gather_matmul",
                    1,
                    {.compute_s = 1, .comm_s = 2, .hidden_s = 1.5, .exposed_s = 0.5}}});
  }
  fcntl(controller, F_SETFL, O_NONBLOCK);
  std::string text(65536, '\0');
  text.resize(
      static_cast<std::size_t>(std::max<ssize_t>(0, read(controller, text.data(), text.size()))));
  std::fclose(out);
  close(controller);
  EXPECT_THAT(text, Not(HasSubstr("iteration 1/3 |")));
  EXPECT_THAT(text, HasSubstr("\r\x1b[K["));
  EXPECT_THAT(text, HasSubstr("1/3 loss 3.5000"));
  EXPECT_THAT(text, HasSubstr("\r\x1b[Ka note\r\n["));
  EXPECT_THAT(text, HasSubstr("3/3 loss 4.5000 | 0:00 left"));
  EXPECT_THAT(text, HasSubstr("\r\nms in a step"));
  std::size_t longest = 0, begin = 0;
  for (std::size_t i = 0; i < text.find("ms in a step"); ++i) {
    if (text[i] == '\r' || text[i] == '\n' || text[i] == '\x1b') begin = i;
    longest = std::max(longest, i - begin);
  }
  EXPECT_LE(longest, 60u + 3u);  // the escape sequence takes no column
}

trace::Totals totals_of(double compute_s, double copy_s, double wait_s, std::int64_t calls) {
  trace::Totals totals;
  totals.seconds = {compute_s, copy_s, wait_s};
  totals.calls = calls;
  return totals;
}

TEST(Overlap, HiddenIsWhatSerialStepsExposeAndMeasuredOnesDoNot) {
  const auto rows = overlap_by_operation({{"gather", totals_of(8, 0.5, 0.5, 16)},
                                          {"norm", totals_of(4, 0, 0, 8)},
                                          {"slower", totals_of(0, 0, 8, 4)},
                                          {"unmeasured", totals_of(0, 1, 3, 4)}},
                                         4,
                                         {{"gather", totals_of(7, 2, 6, 8)},
                                          {"norm", totals_of(4, 0, 0, 4)},
                                          {"slower", totals_of(0, 1, 1, 2)}},
                                         2);
  std::map<std::string, OperationOverlap> by_name;
  for (const auto& row : rows) by_name[row.operation] = row;
  EXPECT_EQ(rows[0].operation, "gather");
  const Overlap& gather = by_name.at("gather").overlap;
  EXPECT_EQ(by_name.at("gather").calls, 4);
  EXPECT_DOUBLE_EQ(gather.compute_s, 2);
  EXPECT_DOUBLE_EQ(gather.comm_s, 4);
  EXPECT_DOUBLE_EQ(gather.exposed_s, 0.25);
  EXPECT_DOUBLE_EQ(gather.hidden_s, 3.75);
  EXPECT_DOUBLE_EQ(by_name.at("norm").overlap.comm_s, 0);
  EXPECT_DOUBLE_EQ(by_name.at("slower").overlap.comm_s, 1);
  EXPECT_DOUBLE_EQ(by_name.at("slower").overlap.exposed_s, 2);
  EXPECT_DOUBLE_EQ(by_name.at("slower").overlap.hidden_s, 0);
  EXPECT_DOUBLE_EQ(by_name.at("unmeasured").overlap.comm_s, 1);
  EXPECT_DOUBLE_EQ(by_name.at("unmeasured").overlap.hidden_s, 0);
  const Overlap all = total_overlap(rows);
  EXPECT_DOUBLE_EQ(all.compute_s, 3);
  EXPECT_DOUBLE_EQ(all.comm_s, 6);
  EXPECT_DOUBLE_EQ(all.hidden_s, 2.75);
  EXPECT_DOUBLE_EQ(all.exposed_s, 3.25);
  EXPECT_THAT(
      overlap_table(rows),
      HasSubstr("gather             4    2000.00    4000.00    3750.00     250.00    94 %\n"));
  EXPECT_THAT(
      overlap_table(rows),
      HasSubstr("all                     3000.00    6000.00    2750.00    3250.00    46 %\n"));
  EXPECT_EQ(overlap_table({}), "");
}

}  // namespace
}  // namespace braid
