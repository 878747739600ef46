// What a person sees of a run: metrics.jsonl, a progress bar on a terminal or plain lines
// elsewhere, and the table at the end. Used by one rank; where disabled
// (all but rank 0) every call does nothing.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "braid/train/overlap.h"

namespace braid {

/// One iteration, as metrics.jsonl has it; the overlap's fields are compute_s, comm_s,
/// hidden_comm_s and exposed_comm_s.
struct IterationMetrics {
  std::int64_t iteration = 0;  // from 1
  double loss = 0;
  double grad_norm = 0;
  double lr = 0;
  double tokens_per_s = 0;
  double tflop_s_per_rank = 0;
  double step_s = 0;
  Overlap overlap;
  std::optional<double> validation_loss;  // where it was measured after this iteration
};

/// As a line of metrics.jsonl, without the line's end; numbers that are not finite are null.
std::string metrics_line(const IterationMetrics& metrics);

/// The bar's line, at most `width` characters: what does not fit is left out, remaining time last, loss never.
std::string progress_line(std::int64_t iteration, std::int64_t num_iterations, double loss,
                          double tokens_per_s, double remaining_s, int width);

struct ReportOptions {
  bool enabled = true;
  std::string metrics_path = {};      // empty: none
  std::int64_t loaded_iteration = 0;  // 0 where nothing was loaded
  std::int64_t num_iterations = 0;    // of the whole run
  std::int64_t log_interval = 1;      // iterations between plain lines
  std::FILE* out = stdout;
};

class Report {
 public:
  /// Keeps the lines of an older metrics file up to loaded_iteration and drops those beyond, which
  /// are done again. Errors: ValueError naming the file when it can't be written.
  explicit Report(ReportOptions options);
  ~Report();
  Report(const Report&) = delete;
  Report& operator=(const Report&) = delete;

  /// Writes the metrics line (flushed) and shows the progress. A metrics file that can't be written
  /// any more is said once and given up: the run goes on.
  void iteration(const IterationMetrics& metrics);
  /// Shows a line of text without disturbing the bar.
  void note(const std::string& text);
  /// Shows a table of hidden communication. The bar ends.
  void finish(const std::vector<OperationOverlap>& rows);

 private:
  void open_metrics();
  void write_metrics(const IterationMetrics& metrics);
  void show_line(const IterationMetrics& metrics);
  void draw_bar(const IterationMetrics& metrics);
  void clear_bar();
  double remaining_s(std::int64_t iteration) const;

  ReportOptions options_;
  bool is_terminal_ = false;
  std::ofstream metrics_;
  std::string bar_;  // as it is on the screen; empty: none is
  std::chrono::steady_clock::time_point begin_, drawn_;
  double loss_sum_ = 0, step_s_sum_ = 0, tokens_sum_ = 0, tflop_sum_ = 0;  // since the last line
  Overlap overlap_sum_;
  std::int64_t num_summed_ = 0;
};

}  // namespace braid
