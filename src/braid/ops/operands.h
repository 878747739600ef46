// What the collective matmuls share: checks of their operands, rows of every rank, the choice of a plan.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

#include "braid/comm/collectives.h"
#include "braid/comm/sums.h"
#include "braid/core/check.h"
#include "braid/ops/collective_matmul.h"
#include "braid/ops/tuner.h"

namespace braid {

/// x as rows: [..., k] -> [rows, k].
inline at::Tensor as_rows(const char* op, const char* what, const at::Tensor& x) {
  BRAID_CHECK(x.dim() >= 2, op, ": ", what, " has ", x.dim(), " dims, at least 2 are needed");
  if (x.dim() == 2) return x.detach();
  return x.detach().reshape(
      {c10::multiply_integers(x.sizes().slice(0, static_cast<std::size_t>(x.dim()) - 1)),
       x.size(-1)});
}

inline void check_inner(const char* op, const at::Tensor& x, std::int64_t n, std::int64_t k,
                        const at::Tensor& bias) {
  BRAID_CHECK(x.size(-1) == k, op, ": inner dimensions differ: x has k = ", x.size(-1),
              ", weight has k = ", k);
  BRAID_CHECK(x.is_floating_point(), op, ": x is ", x.scalar_type(), ", a floating type is needed");
  if (!bias.defined()) return;
  BRAID_CHECK(bias.dim() == 1 && bias.size(0) == n, op, ": bias has shape ", bias.sizes(),
              ", weight has n = ", n);
  BRAID_CHECK(bias.scalar_type() == x.scalar_type(), op, ": dtypes differ: x is ", x.scalar_type(),
              ", bias is ", bias.scalar_type());
}

inline void check_weight(const char* op, const at::Tensor& x, const at::Tensor& weight,
                         const at::Tensor& bias) {
  BRAID_CHECK(weight.dim() == 2, op, ": weight has ", weight.dim(), " dims, expected [n, k]");
  BRAID_CHECK(x.scalar_type() == weight.scalar_type(), op, ": dtypes differ: x is ",
              x.scalar_type(), ", weight is ", weight.scalar_type());
  check_inner(op, x, weight.size(0), weight.size(1), bias);
}

inline void check_weight(const char* op, const at::Tensor& x, const Int8Weight& weight,
                         const at::Tensor& bias) {
  BRAID_CHECK(x.scalar_type() != at::kDouble, op, ": x is ", x.scalar_type(),
              ", with an int8 weight f32, bf16 or fp16 is needed");
  check_inner(op, x, weight.n(), weight.k(), bias);
}

/// The size over all ranks of the dim that is split over them.
inline std::int64_t whole_features(const Group& group, std::int64_t share,
                                   const MatmulOptions& options) {
  return options.whole_features > 0 ? options.whole_features : share * group.size();
}

inline std::int64_t total(const std::vector<std::int64_t>& rows) {
  return std::reduce(rows.begin(), rows.end());
}

/// Fills in the rows of every rank where they are not given and choosing a plan needs them.
inline void learn_rows(const Group& group, const at::Tensor& x_shard, const MatmulOptions& options,
                       std::vector<std::int64_t>& rows) {
  if (group.size() > 1 && options.mode == Mode::automatic && rows.empty())
    rows = all_gather_rows(group, x_shard);
}

/// How a gathering operation runs; fills in rows as learn_rows.
inline Plan choose_gather(const Group& group, const char* op, const at::Tensor& x_shard,
                          std::int64_t n, bool has_native, const MatmulOptions& options,
                          std::vector<std::int64_t>& rows,
                          const std::function<void(const Plan&)>& trial) {
  learn_rows(group, x_shard, options, rows);
  const std::int64_t m = rows.empty() ? x_shard.size(0) * group.size() : total(rows);
  return tuner::choose(group,
                       {op, m, whole_features(group, n, options), x_shard.size(1),
                        x_shard.scalar_type(), /*reduces=*/false, has_native},
                       options, trial);
}

/// Rows of `rows` ranks of a shard with leading dims [t_r, ...] as rows of the flattened shard.
inline std::vector<std::int64_t> flat_rows(const at::Tensor& x, std::vector<std::int64_t> rows) {
  const std::int64_t inner =
      c10::multiply_integers(x.sizes().slice(1, static_cast<std::size_t>(x.dim()) - 2));
  for (auto& n : rows) n *= inner;
  return rows;
}

/// `rows` of every rank as the caller gave them, checked and flattened; empty if not given.
inline std::vector<std::int64_t> given_rows(const Group& group, const char* op,
                                            const at::Tensor& x_shard,
                                            std::vector<std::int64_t> rows) {
  if (rows.empty()) return rows;
  check_rows(group, op, "rows", rows);
  BRAID_CHECK(rows[static_cast<std::size_t>(group.rank())] == x_shard.size(0), op,
              ": rows of rank ", group.rank(), " are given as ",
              rows[static_cast<std::size_t>(group.rank())], ", its shard has ", x_shard.size(0));
  return flat_rows(x_shard, std::move(rows));
}

/// Checks how the rows of x are split over the ranks, where the caller says it.
inline void check_split(const Group& group, const char* op, const at::Tensor& x,
                        const std::vector<std::int64_t>& rows) {
  if (rows.empty()) return;
  check_rows(group, op, "rows", rows);
  BRAID_CHECK(total(rows) == x.size(0), op, ": rows of the ranks add up to ", total(rows),
              ", x has ", x.size(0));
}

/// y [rows, n] with leading dims as in `sizes`, the first of which is what the rows make it.
inline at::Tensor with_leading_dims(const at::Tensor& y, at::IntArrayRef sizes) {
  if (sizes.size() == 2) return y;
  auto shape = sizes.vec();
  shape.back() = y.size(1);
  if (sizes.size() > 2) {
    const std::int64_t inner = c10::multiply_integers(sizes.slice(1, sizes.size() - 2));
    shape[0] = inner == 0 ? sizes[0] : y.size(0) / inner;
  }
  return at::_unsafe_view(y, shape);  // the caller may write to it in place: not a view to autograd
}

}  // namespace braid
