// Sums in blocks.
#include "braid/comm/sums.h"

#include <algorithm>

namespace braid {

void sum_parts(at::Tensor out, at::TensorList parts) {
  if (out.numel() == 0) return;
  if (parts.size() == 2) {  // ATen adds half types in f32 and rounds once
    at::add_out(out, parts[0], parts[1]);
    return;
  }
  constexpr std::int64_t kBlock = 16384;  // elements: the sum stays in the cache
  const std::int64_t rows = out.size(0);
  const std::int64_t step = std::max<std::int64_t>(1, kBlock / (out.numel() / rows));
  const at::ScalarType dtype = sum_dtype(out.scalar_type());
  for (std::int64_t begin = 0; begin < rows; begin += step) {
    const std::int64_t length = std::min(step, rows - begin);
    at::Tensor sum =
        parts[0].narrow(0, begin, length).to(dtype, /*non_blocking=*/false, /*copy=*/true);
    for (const at::Tensor& part : parts.slice(1)) sum.add_(part.narrow(0, begin, length));
    out.narrow(0, begin, length).copy_(sum);
  }
}

}  // namespace braid
