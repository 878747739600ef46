// What ranks show each other at the beginning of an operation, and how it is compared.
#pragma once

#include <c10/util/hash.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace braid {

/// What the ranks must agree on before payload is touched. Written by its rank before flag
/// `published` shows the operation.
struct Header {
  char op[32] = {};           // name of the operation
  std::int64_t dtype = 0;     // at::ScalarType
  std::int64_t n = 0, k = 0;  // sizes all ranks share; 0 where unused
  char variant_is[24] = {};   // one value more that all ranks share: its name, for errors, and it
  std::int64_t variant = 0;
  std::int64_t rows = 0;   // this rank's rows
  bool rows_agree = true;  // rows must be the same on all ranks
  // Filled in by start():
  std::uint64_t slot = 0;  // where the payload lies in this region
  char refused[160] = {};  // why this rank can't take part, or ""

  /// Rows differ by rank. What the caller knows of them, or nothing, must be the same on all ranks.
  void set_rows_of_ranks(const std::vector<std::int64_t>& known) {
    rows_agree = false;
    set_variant("all ranks' rows (hash)",
                known.empty() ? 0 : static_cast<std::int64_t>(c10::get_hash(known)));
  }
  void set_variant(const char* what, std::int64_t value) {
    std::strncpy(variant_is, what, sizeof variant_is - 1);
    variant = value;
  }
};

/// What the headers of an operation differ in, or who refused it, in words; empty if they agree.
///   ranks   whose headers they are, as the group numbers them
std::string disagreement(const std::string& group, const std::vector<int>& ranks,
                         const std::vector<Header>& headers);

}  // namespace braid
