// The two row-tile streams under every collective matmul: where a gathered tile is readable, where
// a partial product goes.
//
// A stream is one operation of its group, used by one thread: next() until it is empty, and for a
// reduce stream finish(). Fused, tiles are read and written in the peers' memory, own tile
// first when gathering (its peers' payload arrives meanwhile), own tile last when reducing (its
// peers' partials arrive meanwhile). Otherwise each chunk is a split-phase collective, in flight
// while the previous chunk is multiplied; 1 chunk is the serial form. No more chunks are made than
// there are rows in the longest shard, or than kMaxChunks.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "braid/comm/group.h"
#include "braid/ops/plan.h"

namespace braid {

/// Rows [begin, begin + data.size(0)) of the gathered tensor.
struct GatheredTile {
  std::int64_t begin;
  at::Tensor data;  // readable until the next next(); maybe a peer's memory
};

class GatherStream {
 public:
  virtual ~GatherStream() = default;
  /// Rows of every rank. Waits for the peers' headers when the caller did not know them.
  virtual const std::vector<std::int64_t>& rows() = 0;
  /// The next tile in order of arrival, waiting for it. Errors: as comm/collectives.h.
  virtual std::optional<GatheredTile> next() = 0;
};

/// Chunks beyond this only cost; and operations that wait for nobody are in flight beside them
/// (kEntries of comm/shared_memory.h).
inline constexpr int kMaxChunks = 32;
/// Of the chunks that were asked for, those that are of use for shards of these rows.
inline int useful_chunks(int num_chunks, const std::vector<std::int64_t>& rows) {
  const std::int64_t most = *std::max_element(rows.begin(), rows.end());
  return static_cast<int>(
      std::clamp<std::int64_t>(num_chunks, 1, std::clamp<std::int64_t>(most, 1, kMaxChunks)));
}

/// Starts gathering x_shard [t_r, k] over `group` (more than one rank).
///   rows   t_r of every rank, or empty
///   name   of the operation, in errors and traces
std::unique_ptr<GatherStream> make_gather_stream(const Group& group, const char* name,
                                                 const at::Tensor& x_shard, const Plan& plan,
                                                 std::vector<std::int64_t> rows);

/// Rows [begin, begin + rows) of x belong into out [rows, n].
struct PartialTile {
  std::int64_t begin, rows;
  at::Tensor out;        // in the result's dtype, or that of its sums
  bool accumulate;       // add to what out holds (in the dtype of sums); else overwrite
  at::Tensor bias = {};  // [n], to be added, or undefined
};

class ReduceStream {
 public:
  virtual ~ReduceStream() = default;
  /// The next tile in order of departure. The previous one is complete and is handed on.
  virtual std::optional<PartialTile> next() = 0;
  /// True when next() may wait for a peer: whoever has other work does it first.
  virtual bool next_waits() const = 0;
  /// After the last tile: waits for the rest and gives the result.
  virtual at::Tensor finish() = 0;
};

struct ReduceShape {
  std::vector<std::int64_t> rows;  // of the result that each rank owns; the same on all ranks
  std::int64_t n = 0;
  at::ScalarType dtype = at::kFloat;
  at::Tensor bias = {};     // [n], added once, or undefined
  bool all_reduce = false;  // every rank gets all rows; else each its own
};
std::unique_ptr<ReduceStream> make_reduce_stream(const Group& group, const char* name,
                                                 ReduceShape shape, const Plan& plan);

}  // namespace braid
