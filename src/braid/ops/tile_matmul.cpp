// Products of row tiles.
#include "braid/ops/tile_matmul.h"

#include <algorithm>

#include "braid/comm/sums.h"
#include "braid/core/trace.h"

namespace braid {
namespace {

// Rows of a half tile that are converted, or multiplied and added, at once: fewer cost a repacking
// of the weight, more leave the cache.
constexpr std::int64_t kHalfTileRows = 512;

/// out (+)= a @ b, where a and b have one dtype and out that of their products' sums or the same.
void multiply_into(at::Tensor out, const at::Tensor& a, const at::Tensor& b, bool accumulate) {
  if (out.scalar_type() != a.scalar_type()) {
    const at::Tensor product = at::mm(a, b);
    if (accumulate)
      out.add_(product);
    else
      out.copy_(product);
  } else if (accumulate) {
    out.addmm_(a, b);
  } else {
    at::mm_out(out, a, b);
  }
}

/// f(begin, rows) over row ranges of at most kHalfTileRows.
template <class F>
void for_each_half_tile(std::int64_t rows, F&& f) {
  for (std::int64_t begin = 0; begin < rows; begin += kHalfTileRows)
    f(begin, std::min(kHalfTileRows, rows - begin));
}

}  // namespace

bool is_native(at::ScalarType dtype, std::int64_t rows) {
  constexpr std::int64_t kFewRows = 64;
  if (at::isReducedFloatingType(dtype) && rows < kFewRows) return true;
#if defined(__x86_64__)
  return dtype == at::kBFloat16 && __builtin_cpu_supports("avx512bf16") != 0;  // as where AMX is
#else
  return false;
#endif
}

TileMatmul::TileMatmul(const AnyWeight& weight, bool native) {
  if (const auto* int8 = std::get_if<Int8Weight>(&weight)) {
    int8_ = *int8;
    return;
  }
  const auto& w = std::get<at::Tensor>(weight);
  weight_t_ = w.to(native ? w.scalar_type() : sum_dtype(w.scalar_type())).t();
}

void TileMatmul::multiply(const at::Tensor& x, at::Tensor out, bool accumulate,
                          const at::Tensor& bias) const {
  std::optional<trace::Span> span;
  if (!int8_) span.emplace(trace::Kind::compute, "matmul");  // else its product is one
  const at::ScalarType dtype = out.scalar_type();
  if (!bias.defined()) {
    multiply_plain(x, out, accumulate);
  } else if (dtype == sum_dtype(dtype)) {
    out.copy_(bias.expand_as(out));
    multiply_plain(x, out, true);
  } else if (!int8_ && weight_t_.scalar_type() == dtype) {
    at::addmm_out(out, bias, x, weight_t_);
  } else {
    for_each_half_tile(x.size(0), [&](std::int64_t begin, std::int64_t rows) {
      at::Tensor out_tile = out.narrow(0, begin, rows);
      const at::Tensor sum = bias.to(sum_dtype(dtype)).expand_as(out_tile).contiguous();
      multiply_plain(x.narrow(0, begin, rows), sum, true);
      out_tile.copy_(sum);
    });
  }
}

void TileMatmul::multiply_plain(const at::Tensor& x, at::Tensor out, bool accumulate) const {
  if (int8_) return int8_->multiply(x, out, accumulate);
  const at::ScalarType dtype = weight_t_.scalar_type();
  if (x.scalar_type() == dtype && out.scalar_type() == dtype)
    return multiply_into(out, x, weight_t_, accumulate);
  for_each_half_tile(x.size(0), [&](std::int64_t begin, std::int64_t rows) {
    const at::Tensor tile = x.narrow(0, begin, rows).to(dtype);
    at::Tensor out_tile = out.narrow(0, begin, rows);
    multiply_into(out_tile, tile, weight_t_, accumulate);
  });
}

at::Tensor multiply_whole(const at::Tensor& x, const AnyWeight& weight, const at::Tensor& bias) {
  const auto* int8 = std::get_if<Int8Weight>(&weight);
  at::Tensor y = at::empty(
      {x.size(0), int8 != nullptr ? int8->n() : std::get<at::Tensor>(weight).size(0)}, x.options());
  TileMatmul(weight, is_native(x.scalar_type(), x.size(0))).multiply(x, y, false, bias);
  return y;
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
