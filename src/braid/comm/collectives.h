// Split-phase collectives: start_x(...) -> Pending, whose wait() gives the result; over shared
// memory inside a host, over the process group between hosts.
//
//   Shapes  rows are dim 0; inputs may be strided, results are new contiguous tensors; groups of
//           one work
//   Keeps   a large all-reduce's result owns a slot of shared memory until it is freed
//   Sums    in f32 (f64 for f64, integers in themselves), in rank order, rounded once: the same
//           bits on every rank and in every run; between hosts as comm/streams.h
//   Order   collective: every rank starts them in the same order on a group, at least two may be in
//           flight; all-reduces are waited for in that order too, as inside a host their second hop is
//           in wait(). Inputs stay unwritten until wait(). Between hosts a reduction's start waits
//           for the ranks of this host
//   Errors  ValueError before any payload, the same on every rank, when dtypes or shapes disagree
//           (between hosts: see docs/errors.md; the group is unusable then); DistBackendError naming op,
//           group, rank, peer, elapsed time and time-out when a peer is lost
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "braid/comm/group.h"
#include "braid/comm/pending.h"

namespace braid {

enum class ReduceOp : std::uint8_t { sum, max };

/// Rows that each of `size` ranks owns of `rows`: as at::tensor_split, the first ones one more.
std::vector<std::int64_t> split_rows(std::int64_t rows, int size);
/// Where a rank's rows begin, given how many each rank owns.
std::int64_t first_row(const std::vector<std::int64_t>& rows, int rank);

/// Checks that `rows` (`what` it is to the caller) has an entry of at least 0 for each rank.
/// Errors: ValueError.
void check_rows(const Group& group, const char* op, const char* what,
                const std::vector<std::int64_t>& rows);

struct RowRange {
  std::int64_t begin = 0, length = 0;
};
/// What this rank owns of `rows`, by split_rows; all of them without a group.
RowRange own_part(const std::shared_ptr<Group>& group, std::int64_t rows);

/// Concatenates the shards of all ranks, rank 0 first.
///   Shapes  x_shard [t_r, ...]; t_r may differ by rank; returns [sum t_r, ...].
///   rows    t_r of every rank where the caller knows them; empty: they are exchanged first (a
///           blocking message between hosts)
Pending<at::Tensor> start_all_gather(const Group& group, const at::Tensor& x_shard,
                                     std::vector<std::int64_t> rows = {});
/// Sums x over the ranks and gives each rank its rows.
///   Shapes  x [t, ...] the same on all ranks; returns [rows[rank], ...].
///   rows    how many rows each rank gets, the same on all ranks; empty: split_rows(t, R)
Pending<at::Tensor> start_reduce_scatter(const Group& group, const at::Tensor& x,
                                         std::vector<std::int64_t> rows = {});
/// Reduces x over the ranks.
///   Shapes  x any, the same on all ranks; returns its shape.
///   out     where the result goes if given; may be x itself
Pending<at::Tensor> start_all_reduce(const Group& group, const at::Tensor& x,
                                     ReduceOp op = ReduceOp::sum, at::Tensor out = {});
/// A reduction whose input is made in place: the caller writes x (it holds anything before) and
/// calls start() once. Inside a host x is where the peers read it, so nothing is copied. Other
/// operations of the group may be started in between, but all must be waited for.
struct Prepared {
  at::Tensor x;  // contiguous; not to be touched after start()
  std::function<Pending<at::Tensor>()> start;
};
Prepared prepare_reduce_scatter(const Group& group, at::IntArrayRef sizes, at::ScalarType dtype,
                                std::vector<std::int64_t> rows = {});
Prepared prepare_all_reduce(const Group& group, at::IntArrayRef sizes, at::ScalarType dtype,
                            at::Tensor out = {});

/// Sends send_rows[p] rows of x to rank p, in order.
///   Shapes  x [sum send_rows, ...]; returns [sum recv_rows, ...], rank 0's rows first.
///   recv_rows   entry p is rank p's send_rows[rank]
Pending<at::Tensor> start_all_to_all(const Group& group, const at::Tensor& x,
                                     std::vector<std::int64_t> send_rows,
                                     std::vector<std::int64_t> recv_rows);

at::Tensor all_gather(const Group& group, const at::Tensor& x_shard,
                      std::vector<std::int64_t> rows = {});
at::Tensor reduce_scatter(const Group& group, const at::Tensor& x,
                          std::vector<std::int64_t> rows = {});
at::Tensor all_reduce(const Group& group, const at::Tensor& x, ReduceOp op = ReduceOp::sum,
                      at::Tensor out = {});
/// The rows of each rank's shard, by rank. Errors: ValueError, the same on all ranks, when the shards' other dims or
/// dtypes differ.
std::vector<std::int64_t> all_gather_rows(const Group& group, const at::Tensor& x_shard);
/// Every rank gets rank `root`'s x; x of the others gives shape and dtype.
at::Tensor broadcast(const Group& group, const at::Tensor& x, int root);
/// Returns once every rank has entered.
void barrier(const Group& group);

}  // namespace braid
