// Checks of what a caller passes: a failed one throws c10::ValueError (ValueError in Python, exit
// code 2 in the CLI).
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>

/// Throws c10::ValueError with the given text parts unless `condition` holds.
#define BRAID_CHECK(condition, ...) TORCH_CHECK_VALUE(condition, __VA_ARGS__)

/// Throws c10::ValueError that names `what` and both values unless a == b.
#define BRAID_CHECK_EQ(a, b, what)                                                   \
  do {                                                                               \
    const auto braid_check_a = (a);                                                  \
    const auto braid_check_b = (b);                                                  \
    TORCH_CHECK_VALUE(braid_check_a == braid_check_b, what, " differ: ", #a, " is ", \
                      braid_check_a, ", ", #b, " is ", braid_check_b);               \
  } while (false)

namespace braid {
/// What an error says, without a backtrace.
inline std::string text_of(const std::exception& error) {
  const auto* known = dynamic_cast<const c10::Error*>(&error);
  return known != nullptr ? known->what_without_backtrace() : error.what();
}
inline std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return text_of(known);
  }
}
}  // namespace braid
