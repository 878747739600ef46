// Every op plainly and blocking: the oracle of the tests. Sums in f64, rounded once.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "braid/comm/group.h"

namespace braid::reference {

/// Contracts as in ops/collective_matmul.h.
at::Tensor all_gather_matmul(const Group& group, const at::Tensor& x_shard,
                             const at::Tensor& weight, const at::Tensor& bias = {});
at::Tensor matmul_all_reduce(const Group& group, const at::Tensor& x, const at::Tensor& weight,
                             const at::Tensor& bias = {});
at::Tensor matmul_reduce_scatter(const Group& group, const at::Tensor& x, const at::Tensor& weight,
                                 const at::Tensor& bias = {});
/// dy^T @ all_gather(x_shard), in f64.
at::Tensor all_gather_wgrad(const Group& group, const at::Tensor& dy, const at::Tensor& x_shard);

}  // namespace braid::reference
