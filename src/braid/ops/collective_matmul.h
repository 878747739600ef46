// Matmul and collective as one pipeline over row tiles: the ops, their modes,
// and the passes that backward needs.
//
// Weights are stored [n, k] (as torch.nn.Linear) and may be any 2-D strided view: a backward pass
// gives weight.t(). x may be strided; leading dims are rows: [..., k].
//   Sums    over ranks: in f32 (f64 for f64), in an order that depends on the plan and the ranks
//           alone (docs/design.md, Sums), rounded once
//   Order   collective: all ranks, same order; at least two may be in flight. A start_ keeps its
//           inputs, which must stay unwritten until wait(); reductions are waited for in the order in
//           which they were started, as an early rank leaves its tiles for wait()
//   Errors  as comm/collectives.h; ValueError before any message when shapes or dtypes of x, weight
//           and bias don't fit
//   Source  CoC: ALL_GATHER_MATMUL (V2), MATMUL_REDUCE_SCATTER, MATMUL_ALL_REDUCE
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "braid/comm/group.h"
#include "braid/comm/pending.h"
#include "braid/ops/int8_weight.h"

namespace braid {

enum class Mode : std::uint8_t {
  serial,   // one collective, one matmul
  chunked,  // num_chunks collectives, each beside the next chunk's matmul
  fused,    // matmuls read and write their peers' memory; between hosts a rank's rows are one tile
  automatic,  // the tuner's choice
};

struct MatmulOptions {
  Mode mode = Mode::automatic;
  int num_chunks = 2;  // of mode chunked; at most 32, and no more than there are rows
  // Of mode fused, reductions, on one host: one partial goes round and every matmul adds to it,
  // instead of partials straight to the owner (NOTE [ring] in comm/fused_reduce.cpp).
  bool ring = false;
  // Half types: multiplied in their own type (true), or through f32; not given: what is faster on
  // this CPU, by type and number of rows. Mode automatic measures it.
  std::optional<bool> native = {};
  // The features of the weight's split dim over all ranks, where the ranks' shares differ; 0: they
  // are equal. Mode automatic needs it, so that all ranks speak of the same operation.
  std::int64_t whole_features = 0;
};

/// y = all_gather(x_shard) @ weight^T + bias.
///   Shapes  x_shard [t_r, k] (t_r may differ by rank)   weight [n, k]   bias [n]
///           returns [sum t_r, n]
///   rows    t_r of every rank where known (see start_all_gather)
///   Cost    (R-1)/R of the gathered rows read from the peers; 2 * sum t_r * k * n flop
[[nodiscard]] at::Tensor all_gather_matmul(const Group& group, const at::Tensor& x_shard,
                                           const at::Tensor& weight, const at::Tensor& bias = {},
                                           MatmulOptions options = {},
                                           std::vector<std::int64_t> rows = {});

struct GatheredMatmul {
  at::Tensor y, x_full;
};
/// As all_gather_matmul, and keeps the gathered input.   Shapes  x_full [sum t_r, k]
[[nodiscard]] GatheredMatmul all_gather_matmul_v2(const Group& group, const at::Tensor& x_shard,
                                                  const at::Tensor& weight,
                                                  const at::Tensor& bias = {},
                                                  MatmulOptions options = {},
                                                  std::vector<std::int64_t> rows = {});

/// Gradient of a weight whose input is sharded by rows: dw (+)= dy^T @ all_gather(x_shard), the
/// shards read where they are.
/// The start publishes x_shard, the wait multiplies: by then the peers' shards are there.
///   Shapes  dy [sum t_r, n]   x_shard [t_r, k]   dw [n, k], f32 or dy's dtype; accumulate adds to it
[[nodiscard]] Pending<void> start_all_gather_wgrad(const Group& group, const at::Tensor& dy,
                                                   const at::Tensor& x_shard, const at::Tensor& dw,
                                                   bool accumulate, MatmulOptions options = {},
                                                   std::vector<std::int64_t> rows = {});
void all_gather_wgrad(const Group& group, const at::Tensor& dy, const at::Tensor& x_shard,
                      const at::Tensor& dw, bool accumulate, MatmulOptions options = {},
                      std::vector<std::int64_t> rows = {});

/// Both gradients of a row-parallel layer in one pass over the gathered tiles:
/// dx = all_gather(dy_shard) @ weight;  dw (+)= all_gather(dy_shard)^T @ x;  db += column sums of
/// all_gather(dy_shard).
///   Shapes  dy_shard [t_r, n]   weight [n, k]   x [sum t_r, k]   dw [n, k]   db [n]
///           returns [sum t_r, k], undefined if !need_dx
///   dw, db  skipped where undefined
[[nodiscard]] at::Tensor all_gather_matmul_backward(const Group& group, const at::Tensor& dy_shard,
                                                    const at::Tensor& weight, const at::Tensor& x,
                                                    bool need_dx, at::Tensor dw, bool accumulate_dw,
                                                    at::Tensor db, MatmulOptions options = {},
                                                    std::vector<std::int64_t> rows = {});

/// y_shard = reduce_scatter(x @ weight^T) + bias, bias added once.
///   Shapes  x [t, k_r] the same t on all ranks   weight [n, k_r]   bias [n]
///           returns [rows[rank], n]
///   rows    how many rows each rank gets, the same on all ranks; empty: split_rows(t, R)
///   Keeps   a large result owns a slot of shared memory until it is freed (NOTE [kept result])
///   Cost    (R-1)/R * t * n sums written to the peers; 2 * t * k_r * n flop
[[nodiscard]] Pending<at::Tensor> start_matmul_reduce_scatter(
    const Group& group, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {},
    MatmulOptions options = {}, std::vector<std::int64_t> rows = {});
[[nodiscard]] at::Tensor matmul_reduce_scatter(const Group& group, const at::Tensor& x,
                                               const at::Tensor& weight,
                                               const at::Tensor& bias = {},
                                               MatmulOptions options = {},
                                               std::vector<std::int64_t> rows = {});

/// Makes mode automatic's choice for that operation now: while another operation of the group is in
/// flight nothing is measured, and a rule of thumb serves. Order: collective.
void tune_matmul_reduce_scatter(const Group& group, const at::Tensor& x, const at::Tensor& weight,
                                MatmulOptions options = {}, std::vector<std::int64_t> rows = {});

/// y = all_reduce(x @ weight^T) + bias, bias added once.
///   Shapes  x [..., k_r]   weight [n, k_r]   bias [n]   returns [..., n]
///   Keeps   as matmul_reduce_scatter
///   Cost    (R-1)/R * t * n sums written to the peers, as many read from them; 2 * t * k_r * n flop
[[nodiscard]] Pending<at::Tensor> start_matmul_all_reduce(const Group& group, const at::Tensor& x,
                                                          const at::Tensor& weight,
                                                          const at::Tensor& bias = {},
                                                          MatmulOptions options = {});
[[nodiscard]] at::Tensor matmul_all_reduce(const Group& group, const at::Tensor& x,
                                           const at::Tensor& weight, const at::Tensor& bias = {},
                                           MatmulOptions options = {});
/// The same with an int8 weight (w8A16): x and bias f32, bf16 or fp16.
[[nodiscard]] Pending<at::Tensor> start_matmul_all_reduce(const Group& group, const at::Tensor& x,
                                                          const Int8Weight& weight,
                                                          const at::Tensor& bias = {},
                                                          MatmulOptions options = {});
[[nodiscard]] at::Tensor matmul_all_reduce(const Group& group, const at::Tensor& x,
                                           const Int8Weight& weight, const at::Tensor& bias = {},
                                           MatmulOptions options = {});

}  // namespace braid
