// How much of the communication was hidden, per kind of operation: from spans of measured and of serial steps.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "braid/core/trace.h"

namespace braid {

/// Seconds of one step on this rank.
struct Overlap {
  double compute_s = 0;
  double comm_s = 0;     // what the same operations expose in serial mode
  double hidden_s = 0;   // comm - exposed, between 0 and comm
  double exposed_s = 0;  // waits and copies, see NOTE [exposed] in core/trace.h

  Overlap& operator+=(const Overlap& other);
};

struct OperationOverlap {
  std::string operation;
  double calls = 0;  // in a step
  Overlap overlap;
};

/// One row an operation, those with the most communication first, per step.
///   measured, serial  totals over num_measured and num_serial steps
///   An operation without serial steps counts what it exposed as its communication, and nothing as
///   hidden.
std::vector<OperationOverlap> overlap_by_operation(
    const std::map<std::string, trace::Totals>& measured, std::int64_t num_measured,
    const std::map<std::string, trace::Totals>& serial, std::int64_t num_serial);

/// All rows together; hidden is that of the sums, as rows that hide nothing count against those that do.
Overlap total_overlap(const std::vector<OperationOverlap>& rows);

/// The rows and their sum as lines of text, times in milliseconds; empty where there are no rows.
std::string overlap_table(const std::vector<OperationOverlap>& rows);

}  // namespace braid
