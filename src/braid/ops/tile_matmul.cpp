// Products of row tiles.
#include "braid/ops/tile_matmul.h"

#include <algorithm>

#include "braid/comm/transports.h"
#include "braid/core/trace.h"

namespace braid {
namespace {

// Rows of a half tile that are converted at once: fewer cost a repacking of the weight, more leave
// the cache.
constexpr std::int64_t kHalfTileRows = 512;

void multiply_into(at::Tensor out, const at::Tensor& a, const at::Tensor& b, bool accumulate) {
  if (accumulate)
    out.addmm_(a, b);
  else
    at::mm_out(out, a, b);
}

/// f(begin, rows) over row ranges of at most kHalfTileRows.
template <class F>
void for_each_half_tile(std::int64_t rows, F&& f) {
  for (std::int64_t begin = 0; begin < rows; begin += kHalfTileRows)
    f(begin, std::min(kHalfTileRows, rows - begin));
}

}  // namespace

TileMatmul::TileMatmul(const at::Tensor& weight)
    : weight_t_(weight.to(sum_dtype(weight.scalar_type())).t()) {}

void TileMatmul::multiply(const at::Tensor& x, at::Tensor out, bool accumulate) const {
  const trace::Span span(trace::Kind::compute, "matmul");
  const at::ScalarType dtype = weight_t_.scalar_type();
  if (x.scalar_type() == dtype) return multiply_into(out, x, weight_t_, accumulate);
  for_each_half_tile(x.size(0), [&](std::int64_t begin, std::int64_t rows) {
    const at::Tensor tile = x.narrow(0, begin, rows).to(dtype);
    at::Tensor out_tile = out.narrow(0, begin, rows);
    if (out.scalar_type() == dtype)
      multiply_into(out_tile, tile, weight_t_, accumulate);
    else
      out_tile.copy_(at::mm(tile, weight_t_));
  });
}

void add_weight_grad(const at::Tensor& dy, const at::Tensor& x, at::Tensor dw, bool accumulate) {
  const trace::Span span(trace::Kind::compute, "weight_grad");
  const at::ScalarType dtype = dw.scalar_type();
  if (x.scalar_type() == dtype && dy.scalar_type() == dtype)
    return multiply_into(dw, dy.t(), x, accumulate);
  if (x.size(0) == 0 && !accumulate) dw.zero_();
  for_each_half_tile(x.size(0), [&](std::int64_t begin, std::int64_t rows) {
    multiply_into(dw, dy.narrow(0, begin, rows).to(dtype).t(), x.narrow(0, begin, rows).to(dtype),
                  accumulate || begin > 0);
  });
}

}  // namespace braid
