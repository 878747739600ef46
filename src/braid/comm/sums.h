// Sums over ranks: in f32 for half types, in the order given, rounded once.
#pragma once

#include <ATen/ATen.h>

namespace braid {

/// The dtype that sums are made in: f32 for half types, else the same.
inline at::ScalarType sum_dtype(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
}

/// out = parts[0] + parts[1] + ..., block by block, so that it is one pass over memory.
///   Shapes  all the same; parts in any dtype whose sum_dtype is that of out
///   out     may be one of the parts
void sum_parts(at::Tensor out, at::TensorList parts);

}  // namespace braid
