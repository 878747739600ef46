// Linear layers whose weight is split over the tensor-parallel ranks, with
// forward and backward as collective matmuls.
//
// Rows are tokens: x [..., k] is used as [t, k]. With sequence parallelism the input of a column
// layer and the output of a row layer hold this rank's rows only, in rank order: as many as the
// options say, which may differ by rank.
//
// NOTE [backward is collective]: all ranks run backward in the same order and for the same inputs,
// so x, weight and bias require grad on all ranks or on none.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "braid/comm/group.h"
#include "braid/ops/collective_matmul.h"

namespace braid {

struct LinearOptions {
  std::shared_ptr<Group> group;    // the tensor-parallel ranks; null: a group of one
  bool sequence_parallel = false;  // the replicated side holds this rank's rows only
  MatmulOptions matmul;            // whole_features: of the weight's split dim
  // Column with sequence parallelism: keeps the gathered x, so that backward need not gather it again.
  bool keep_gathered = false;
  // f32 or the weight's type, the weight's shape: takes dW by addition, and no gradient is returned
  // for the weight.
  at::Tensor main_grad;
  // With sequence parallelism: tokens of each rank on the split side, the same on all ranks. Empty:
  // column exchanges them first, row takes split_rows(t, R).
  std::vector<std::int64_t> rows;
};

/// y = x W^T + b, weight split by output features.
///   Shapes  x [t, k], with sequence parallelism [rows[rank], k]   weight [n_r, k]
///           bias [n_r]   returns [t, n_r]; leading dims of x stay, but dim 0 grows by the gather
///   Grad x  all_reduce(dy W), with sequence parallelism reduce_scatter(dy W): on its way while dW
///           is computed
///   Grad w  dy^T x, with sequence parallelism over the gathered x
///   Grad b  column sums of dy
///   Saved   x (or the gathered x), weight
///   Errors  ValueError before any message: ranks, shapes or dtypes of x, weight, bias, main_grad,
///           rows don't fit
at::Tensor column_parallel_linear(const at::Tensor& x, const at::Tensor& weight,
                                  const at::Tensor& bias, const LinearOptions& options);

/// y = sum over ranks of x_r W_r^T, plus b once; weight split by input features.
///   Shapes  x [t, k_r]   weight [n, k_r]   bias [n], the same on all ranks
///           returns [t, n], with sequence parallelism [rows[rank], n]
///   Grad x  dy W, with sequence parallelism over the gathered dy, in one pass with the others
///   Grad w  dy^T x
///   Grad b  column sums of the whole dy: complete on every rank
///   Saved   x, weight
///   Errors  as above; also, under sequence parallelism, x of 3 or more dims whose inner ones cut
///           a rank's rows
at::Tensor row_parallel_linear(const at::Tensor& x, const at::Tensor& weight,
                               const at::Tensor& bias, const LinearOptions& options);

}  // namespace braid
