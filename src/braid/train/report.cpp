// Metrics file, progress bar, plain lines.
#include "braid/train/report.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "braid/core/check.h"
#include "braid/core/file.h"

namespace braid {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kRedrawInterval = std::chrono::milliseconds(100);

int terminal_width(std::FILE* out) {
  winsize size{};
  return ioctl(fileno(out), TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

bool is_terminal(std::FILE* out) {
  const char* term = std::getenv("TERM");
  return isatty(fileno(out)) == 1 && (term == nullptr || std::strcmp(term, "dumb") != 0);
}

// 1234567 -> "1.23M".
std::string short_number(double x) {
  if (!std::isfinite(x)) return "?";
  const char* suffix = "";
  for (const char* next : {"k", "M", "G", "T"}) {
    if (x < 1000) break;
    x /= 1000;
    suffix = next;
  }
  return fmt::format("{:.3g}{}", x, suffix);
}

// 3723 -> "1:02:03".
std::string clock_time(double seconds) {
  if (!std::isfinite(seconds) || seconds > 1e9) return "?";
  const auto s = static_cast<std::int64_t>(std::lround(std::max(0.0, seconds)));
  if (s >= 3600) return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
  return fmt::format("{}:{:02}", s / 60, s % 60);
}

// Output that nobody can take (a full disk, a closed pipe) must not end a run.
void put(std::FILE* out, const std::string& text) {
  std::fputs(text.c_str(), out);
  std::fflush(out);
}

constexpr const char* kClearLine = "\r\x1b[K";

}  // namespace

std::string metrics_line(const IterationMetrics& metrics) {
  nlohmann::ordered_json line = {{"iteration", metrics.iteration},
                                 {"loss", metrics.loss},
                                 {"grad_norm", metrics.grad_norm},
                                 {"lr", metrics.lr},
                                 {"tokens_per_s", metrics.tokens_per_s},
                                 {"tflop_s_per_rank", metrics.tflop_s_per_rank},
                                 {"step_s", metrics.step_s},
                                 {"compute_s", metrics.overlap.compute_s},
                                 {"comm_s", metrics.overlap.comm_s},
                                 {"hidden_comm_s", metrics.overlap.hidden_s},
                                 {"exposed_comm_s", metrics.overlap.exposed_s}};
  if (metrics.validation_loss) line["validation_loss"] = *metrics.validation_loss;
  return line.dump();  // writes numbers that are not finite as null
}

std::string progress_line(std::int64_t iteration, std::int64_t num_iterations, double loss,
                          double tokens_per_s, double remaining_s, int width) {
  const double share =
      num_iterations > 0 ? static_cast<double>(iteration) / static_cast<double>(num_iterations) : 0;
  std::string text = fmt::format("loss {:.4f}", loss);
  const auto room = [&](std::size_t size) {
    return text.size() + size <= static_cast<std::size_t>(std::max(0, width));
  };
  const auto add = [&](const std::string& part) {
    if (room(part.size())) text += part;
  };
  const std::string count = fmt::format("{}/{} ", iteration, num_iterations);
  if (room(count.size())) text.insert(0, count);
  add(fmt::format(" | {} left", clock_time(remaining_s)));
  add(fmt::format(" | {} tokens/s", short_number(tokens_per_s)));
  constexpr std::size_t kShortestBar = 5, kLongestBar = 30;
  if (room(kShortestBar + 3)) {
    const std::size_t length =
        std::min(kLongestBar, static_cast<std::size_t>(width) - text.size() - 3);
    const auto done =
        static_cast<std::size_t>(std::clamp(share, 0.0, 1.0) * static_cast<double>(length));
    text.insert(0, fmt::format("[{:#<{}}{:.<{}}] ", "", done, "", length - done));
  }
  return text.substr(0, static_cast<std::size_t>(std::max(0, width)));
}

Report::Report(ReportOptions options) : options_(std::move(options)), begin_(Clock::now()) {
  if (!options_.enabled) return;
  is_terminal_ = is_terminal(options_.out);
  if (!options_.metrics_path.empty()) open_metrics();
}

Report::~Report() { clear_bar(); }

void Report::open_metrics() {
  const std::string& path = options_.metrics_path;
  std::string kept;
  std::ifstream before(path);
  for (std::string line; std::getline(before, line);) {
    const auto json = nlohmann::json::parse(line, nullptr, false);
    const auto found = json.find("iteration");  // end() of what is no object
    if (found == json.end() || !found->is_number_integer()) continue;
    if (found->get<std::int64_t>() <= options_.loaded_iteration) kept += line + "\n";
  }
  before.close();
  try {
    replace_file(path, kept);
  } catch (const c10::Error& error) {
    BRAID_CHECK(false, error.what_without_backtrace());
  }
  metrics_.open(path, std::ios::app);
  BRAID_CHECK(metrics_.good(), "can't write ", path, ": ", std::strerror(errno));
}

void Report::write_metrics(const IterationMetrics& metrics) {
  if (!metrics_.is_open()) return;
  errno = 0;
  metrics_ << metrics_line(metrics) << std::endl;
  if (metrics_.good()) return;
  const std::string reason = std::strerror(errno);
  metrics_.close();
  note(fmt::format("warning: can't write {}: {}; the run goes on without it", options_.metrics_path,
                   reason));
}

double Report::remaining_s(std::int64_t iteration) const {
  const double elapsed_s = std::chrono::duration<double>(Clock::now() - begin_).count();
  const auto done =
      static_cast<double>(std::max<std::int64_t>(1, iteration - options_.loaded_iteration));
  return elapsed_s / done * static_cast<double>(options_.num_iterations - iteration);
}

void Report::iteration(const IterationMetrics& metrics) {
  if (!options_.enabled) return;
  write_metrics(metrics);
  loss_sum_ += metrics.loss;
  step_s_sum_ += metrics.step_s;
  tokens_sum_ += metrics.tokens_per_s * metrics.step_s;
  tflop_sum_ += metrics.tflop_s_per_rank * metrics.step_s;
  overlap_sum_ += metrics.overlap;
  ++num_summed_;
  if (is_terminal_) {
    draw_bar(metrics);
  } else if (metrics.iteration % options_.log_interval == 0 ||
             metrics.iteration == options_.num_iterations) {
    show_line(metrics);
  }
  if (metrics.validation_loss) {
    note(fmt::format(" validation loss at iteration {}: {:.4f}", metrics.iteration,
                     *metrics.validation_loss));
  }
}

void Report::show_line(const IterationMetrics& metrics) {
  const auto n = static_cast<double>(num_summed_);
  const Overlap& overlap = overlap_sum_;
  std::string line = fmt::format(
      " iteration {:>{}}/{} | loss {:.4f} | grad norm {:.3f} | lr {:.3e} | {:.1f} ms | {:.0f} "
      "tokens/s | {:.4f} "
      "TFLOP/s per rank",
      metrics.iteration, std::to_string(options_.num_iterations).size(), options_.num_iterations,
      loss_sum_ / n, metrics.grad_norm, metrics.lr, 1e3 * step_s_sum_ / n,
      tokens_sum_ / step_s_sum_, tflop_sum_ / step_s_sum_);
  if (overlap.comm_s > 0) {
    const double hidden_s = std::max(0.0, overlap.comm_s - overlap.exposed_s);
    line += fmt::format(" | comm {:.1f} ms, {:.0f} % hidden", 1e3 * overlap.comm_s / n,
                        100 * hidden_s / overlap.comm_s);
  }
  line += fmt::format(" | {} left", clock_time(remaining_s(metrics.iteration)));
  note(line);
  loss_sum_ = step_s_sum_ = tokens_sum_ = tflop_sum_ = 0;
  overlap_sum_ = {};
  num_summed_ = 0;
}

void Report::draw_bar(const IterationMetrics& metrics) {
  const auto now = Clock::now();
  if (!bar_.empty() && now - drawn_ < kRedrawInterval &&
      metrics.iteration < options_.num_iterations)
    return;
  drawn_ = now;
  bar_ =
      progress_line(metrics.iteration, options_.num_iterations, metrics.loss, metrics.tokens_per_s,
                    remaining_s(metrics.iteration), terminal_width(options_.out) - 1);
  put(options_.out, fmt::format("{}{}", kClearLine, bar_));
}

void Report::clear_bar() {
  if (!bar_.empty()) put(options_.out, kClearLine);
}

void Report::note(const std::string& text) {
  if (!options_.enabled) return;
  clear_bar();
  put(options_.out, fmt::format("{}\n{}", text, bar_));
}

void Report::finish(const std::vector<OperationOverlap>& rows) {
  if (!options_.enabled) return;
  put(options_.out, fmt::format("{}{}", bar_.empty() ? "" : "\n", overlap_table(rows)));
  bar_.clear();
}

}  // namespace braid
