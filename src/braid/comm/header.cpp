// Compares headers.
#include "braid/comm/header.h"

#include <c10/core/ScalarType.h>
#include <fmt/format.h>

namespace braid {

std::string disagreement(const std::string& group, const std::vector<int>& ranks,
                         const std::vector<Header>& headers) {
  for (std::size_t r = 0; r < headers.size(); ++r)
    if (headers[r].refused[0] != 0)
      return fmt::format("{}: rank {} of group {} can't take part: {}", headers[r].op, ranks[r],
                         group, headers[r].refused);
  const Header& a = headers[0];
  for (std::size_t r = 1; r < headers.size(); ++r) {
    const Header& b = headers[r];
    const auto differ = [&](const char* what, const auto& x, const auto& y) {
      return fmt::format("{}: ranks {} and {} of group {} disagree in {}: {} and {}", a.op,
                         ranks[0], ranks[r], group, what, x, y);
    };
    if (std::strcmp(a.op, b.op) != 0) return differ("the operation", a.op, b.op);
    if (a.dtype != b.dtype)
      return differ("dtype", c10::toString(static_cast<c10::ScalarType>(a.dtype)),
                    c10::toString(static_cast<c10::ScalarType>(b.dtype)));
    if (a.n != b.n) return differ("n", a.n, b.n);
    if (a.k != b.k) return differ("k", a.k, b.k);
    if ((a.rows_agree || b.rows_agree) && a.rows != b.rows) return differ("rows", a.rows, b.rows);
    if (a.variant != b.variant) return differ(a.variant_is, a.variant, b.variant);
  }
  return {};
}

}  // namespace braid
