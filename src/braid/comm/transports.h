// The collectives over each transport, as comm/collectives.h describes them; groups of more than one.
#pragma once

#include "braid/comm/collectives.h"
#include "braid/comm/sums.h"

namespace braid {

inline std::int64_t row_elements(const at::Tensor& x) {
  return x.dim() == 0 ? 1 : c10::multiply_integers(x.sizes().slice(1));
}

/// The shape of x with another number of rows.
inline std::vector<std::int64_t> with_rows(const at::Tensor& x, std::int64_t rows) {
  auto shape = x.sizes().vec();
  shape[0] = rows;
  return shape;
}

/// The all-to-all inside a host and between hosts. Errors, where send_rows and recv_rows of the ranks don't match:
/// the same ValueError on every rank, after which a group on several hosts refuses further calls.
Pending<at::Tensor> start_all_to_all_parts(const Group& group, const at::Tensor& x,
                                           std::vector<std::int64_t> send_rows,
                                           std::vector<std::int64_t> recv_rows);

/// The collectives over one transport: detached inputs, arguments checked.
struct Transport {
  Pending<at::Tensor> (*start_all_gather)(const Group& group, const at::Tensor& x_shard,
                                          std::vector<std::int64_t> rows);
  Pending<at::Tensor> (*start_reduce_scatter)(const Group& group, const at::Tensor& x,
                                              std::vector<std::int64_t> rows);
  Pending<at::Tensor> (*start_all_reduce)(const Group& group, const at::Tensor& x, ReduceOp op,
                                          at::Tensor out);
  Pending<at::Tensor> (*start_all_to_all)(const Group& group, const at::Tensor& x,
                                          std::vector<std::int64_t> send_rows,
                                          std::vector<std::int64_t> recv_rows);
  at::Tensor (*broadcast)(const Group& group, const at::Tensor& x, int root);
  void (*barrier)(const Group& group);
};

/// Over the memory that the ranks of a host map. A start publishes, the wait reads the peers' slots.
extern const Transport kShared;
namespace shared {
Prepared prepare_reduce_scatter(const Group& group, at::IntArrayRef sizes, at::ScalarType dtype,
                                std::vector<std::int64_t> rows);
Prepared prepare_all_reduce(const Group& group, at::IntArrayRef sizes, at::ScalarType dtype,
                            ReduceOp op, at::Tensor out);
Pending<at::Tensor> start_reduce_scatter(const Group& group, const at::Tensor& x,
                                         std::vector<std::int64_t> rows);
Pending<at::Tensor> start_all_reduce(const Group& group, const at::Tensor& x, ReduceOp op,
                                     at::Tensor out);
}  // namespace shared
/// Between hosts: over the fused streams of comm/streams.h, so a byte crosses the wire once a host.
extern const Transport kBetweenHosts;
/// The process group's own: blocking, sums in its own order, losses not named.
extern const Transport kEngine;

}  // namespace braid
