// Loops behind Int8Weight, compiled once for each instruction set, and the choice among them. Plain
// pointers only: what is inlined into code for one instruction set must not be used by the others.
//
// NOTE [packed]. Both operands lie as the loops read them.
//   values  int8 [panels][k, even][kPanel]: a panel is kPanel outputs, the last one padded with
//           zeros; an odd k gets a row of zeros
//   x       blocks of rows, balanced (block_begin); a block is [k, even][rows of the block] in f32,
//           or for multiply_bf16 [k, even / 2][rows of the block] of pairs of neighbours in k
//   total   f32 [panels][rows][kPanel]
#pragma once

#include <cstdint>
#include <vector>

namespace braid::int8 {

inline constexpr std::int64_t kPanel = 32;

/// Columns that share scales and are summed in one go; bits of a row depend on these, not on the
/// number of rows.
struct Segment {
  std::int64_t begin, end, group;
};

struct Product {
  const std::int8_t* values;
  const float *scales, *zero_points;  // [groups, panels * kPanel]; zero points may be null
  const void* x;
  const float* x_sums;  // [segments, rows] sums of x over each segment; null without zero points
  float* total;         // added to
  const Segment* segments;
  std::int64_t num_segments, num_panels, rows, num_blocks, k_even;
};

inline std::int64_t block_begin(const Product& p, std::int64_t block) {
  return p.rows * block / p.num_blocks;
}

struct Kernel {
  /// total += (x @ (values - zero_points)^T) * scales for some panels.
  using Multiply = void (*)(const Product&, std::int64_t begin_panel, std::int64_t end_panel);

  const char* name;
  std::int64_t block_rows;  // at most, in a block of x
  Multiply multiply_f32;
  Multiply multiply_bf16;  // products of bf16 pairs, summed in f32; null where it isn't faster.
                           // Segments begin at even columns
};

/// Those that this CPU can run, the best one last.
const std::vector<Kernel>& kernels();

}  // namespace braid::int8
