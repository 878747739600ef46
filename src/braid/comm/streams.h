// The two row-tile streams under every collective matmul: where a gathered tile is readable, where a partial
// product goes. And their fused forms: the ranks of a host read and write each other's memory, tiles for other
// hosts travel while others are made.
//
// A stream is one operation of its group, used by one thread: next() until it is empty, and for a
// reduce stream finish().
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "braid/comm/collectives.h"
#include "braid/comm/group.h"

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

/// Pieces of a rank's rows beyond this only cost; and operations that wait for nobody are in flight beside
/// them (kEntries of comm/shared_memory.h).
inline constexpr int kMaxChunks = 32;
/// Of the pieces that were asked for, those that are of use for shards of these rows; at least 1.
int useful_chunks(int num_chunks, const std::vector<std::int64_t>& rows);

/// A tile's part of a rank's rows where they are cut for the wire: the first and last ones are half as large,
/// since nothing travels before the first is made, or is left to do while the last one travels.
RowRange tile_range(std::int64_t rows, int num_tiles, int tile);

/// Gathers x_shard [t_r, k] over `group` (more than one rank). The order: own rows, those of the host's other
/// ranks in their memory, then tiles from other hosts as they arrive. Everything is sent, and every
/// receive posted, here.
///   rows         t_r of every rank; on one host maybe empty
///   num_tiles    into which rows that come from another host are cut; useful_chunks() of them, 0 as 1
std::unique_ptr<GatherStream> make_fused_gather(const Group& group, const char* name,
                                                const at::Tensor& x_shard,
                                                std::vector<std::int64_t> rows, int num_tiles);

/// Reduces partial products over `group` (more than one rank). The order: rows of ranks on other hosts, summed on
/// this host and then sent, those of the host's other ranks, own rows.
///   ring, native   as ops/plan.h; a ring on one host only
///   num_tiles      into which every rank's rows are cut where there are several hosts; 0 as 1
std::unique_ptr<ReduceStream> make_fused_reduce(const Group& group, const char* name,
                                                ReduceShape shape, bool ring, bool native,
                                                int num_tiles);

}  // namespace braid
