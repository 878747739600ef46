// Arithmetic and table of hidden communication.
#include "braid/train/overlap.h"

#include <fmt/format.h>

#include <algorithm>

#include "braid/core/check.h"

namespace braid {

Overlap& Overlap::operator+=(const Overlap& other) {
  compute_s += other.compute_s;
  comm_s += other.comm_s;
  hidden_s += other.hidden_s;
  exposed_s += other.exposed_s;
  return *this;
}

std::vector<OperationOverlap> overlap_by_operation(
    const std::map<std::string, trace::Totals>& measured, std::int64_t num_measured,
    const std::map<std::string, trace::Totals>& serial, std::int64_t num_serial) {
  BRAID_CHECK(num_measured > 0, "num_measured is ", num_measured, ", expected at least 1");
  BRAID_CHECK(num_serial > 0 || serial.empty(), "num_serial is ", num_serial, " with ",
              serial.size(), " operations");
  std::vector<OperationOverlap> rows;
  const double per_step = 1.0 / static_cast<double>(num_measured);
  for (const auto& [name, totals] : measured) {
    OperationOverlap& row = rows.emplace_back();
    row.operation = name;
    row.calls = per_step * static_cast<double>(totals.calls);
    Overlap& overlap = row.overlap;
    overlap.compute_s = per_step * totals.compute_s();
    overlap.exposed_s = per_step * totals.exposed_s();
    const auto found = serial.find(name);
    overlap.comm_s = found == serial.end()
                         ? overlap.exposed_s
                         : found->second.exposed_s() / static_cast<double>(num_serial);
    overlap.hidden_s = std::clamp(overlap.comm_s - overlap.exposed_s, 0.0, overlap.comm_s);
  }
  std::stable_sort(rows.begin(), rows.end(),
                   [](const OperationOverlap& a, const OperationOverlap& b) {
                     return a.overlap.comm_s > b.overlap.comm_s;
                   });
  return rows;
}

Overlap total_overlap(const std::vector<OperationOverlap>& rows) {
  Overlap total;
  for (const OperationOverlap& row : rows) total += row.overlap;
  // Of the sums: where ranks drift apart, one operation waits for what another one did not.
  total.hidden_s = std::clamp(total.comm_s - total.exposed_s, 0.0, total.comm_s);
  return total;
}

std::string overlap_table(const std::vector<OperationOverlap>& rows) {
  if (rows.empty()) return {};
  std::size_t width = std::string("ms in a step").size();
  for (const OperationOverlap& row : rows) width = std::max(width, row.operation.size());
  std::string text = fmt::format("{:<{}} {:>7} {:>10} {:>10} {:>10} {:>10} {:>7}\n", "ms in a step",
                                 width, "calls", "compute", "comm", "hidden", "exposed", "share");
  const auto add = [&](const std::string& name, const std::string& calls, const Overlap& overlap) {
    const std::string share =
        overlap.comm_s > 0 ? fmt::format("{:.0f} %", 100 * overlap.hidden_s / overlap.comm_s) : "-";
    text += fmt::format("{:<{}} {:>7} {:>10.2f} {:>10.2f} {:>10.2f} {:>10.2f} {:>7}\n", name, width,
                        calls, 1e3 * overlap.compute_s, 1e3 * overlap.comm_s,
                        1e3 * overlap.hidden_s, 1e3 * overlap.exposed_s, share);
  };
  for (const OperationOverlap& row : rows)
    add(row.operation, fmt::format("{:.4g}", row.calls), row.overlap);
  const Overlap all = total_overlap(rows);
  add("all", "", all);
  if (all.comm_s > 0)
    text +=
        "comm: exposed when nothing overlaps; hidden: comm - exposed, of the sums in `all`. An "
        "operation whose\nranks come to it at different times exposes more than its comm.\n";
  return text;
}

}  // namespace braid
