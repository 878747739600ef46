// Checks of what a caller passes: a failed one throws c10::ValueError (ValueError in Python, exit
// code 2 in the CLI).
#pragma once

#include <c10/util/Exception.h>

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
