// Shared by the layers' tests: parts of whole tensors, comparison of values.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "braid/comm/collectives.h"
#include "tests/support/ranks.h"

namespace braid::test {

/// Rank `rank`'s part of x along dim, by split_rows.
inline at::Tensor part_of(const at::Tensor& x, int dim, int rank, int num_ranks) {
  const auto lengths = split_rows(x.size(dim), num_ranks);
  return x.narrow(dim, first_row(lengths, rank), lengths.at(rank));
}

/// Fails unless the shapes are equal and no value differs by more than tolerance
/// * (1 + largest expected value).
inline void expect_close(const at::Tensor& actual, const at::Tensor& expected, double tolerance,
                         const std::string& what) {
  ASSERT_TRUE(actual.defined()) << what << " is undefined";
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  if (expected.numel() == 0) return;
  const at::NoGradGuard no_grad;
  const auto a = actual.to(at::kDouble), e = expected.to(at::kDouble);
  const double error = (a - e).abs().max().item<double>();
  EXPECT_LE(error, tolerance * (1 + e.abs().max().item<double>())) << what;
  EXPECT_TRUE(at::isfinite(a).all().item<bool>()) << what;
}

}  // namespace braid::test
