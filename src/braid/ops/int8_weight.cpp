// Packing, slicing and quantization of int8 weights, and the parts of their products that ATen does.
#include "braid/ops/int8_weight.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "braid/core/check.h"
#include "braid/core/trace.h"

namespace braid {
namespace {

using int8::kPanel;
using int8::Segment;
using std::int64_t;

constexpr int64_t kSegmentColumns = 512;      // at most: bounds the error of a sum
constexpr int64_t kTileRows = 128;            // of x that are packed at once
constexpr int64_t kThreadProducts = 1 << 18;  // worth a thread

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool is_activation(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

/// Groups that k columns from first_column on touch; one without group_size.
int64_t count_groups(int64_t k, int64_t group_size, int64_t first_column) {
  if (group_size == 0) return 1;
  return k == 0 ? 0 : (first_column + k - 1) / group_size - first_column / group_size + 1;
}

std::vector<Segment> cut_segments(int64_t k, int64_t group_size, int64_t first_column) {
  std::vector<Segment> segments;
  for (int64_t begin = 0, end = 0, group = 0; begin < k; begin = end) {
    const int64_t left =
        group_size == 0 ? k : (first_column / group_size + group + 1) * group_size - first_column;
    end = std::min({k, left, begin + kSegmentColumns});
    segments.push_back({begin, end, group});
    if (end == left) ++group;
  }
  return segments;
}

/// f32 [groups, n rounded up to panels] from any of the shapes that scales may have.
at::Tensor pack_parameters(const at::Tensor& parameters, int64_t n, int64_t groups,
                           int64_t group_size) {
  at::Tensor whole = parameters.to(at::kFloat);
  if (group_size == 0) whole = whole.reshape({-1, 1}).expand({n, 1});
  return at::constant_pad_nd(whole.t(), {0, ceil_div(n, kPanel) * kPanel - n}).contiguous();
}

/// Blocks of rows as NOTE [packed] has them, of units of 4 bytes (an f32, or a pair of bf16).
void pack_rows(const std::uint32_t* x, int64_t units, const int8::Product& p,
               std::uint32_t* packed) {
  constexpr int64_t kLine = 16;
  for (int64_t block = 0; block < p.num_blocks; ++block) {
    const int64_t first = int8::block_begin(p, block);
    const int64_t rows = int8::block_begin(p, block + 1) - first;
    for (int64_t line = 0; line < units; line += kLine) {
      const int64_t end = std::min(units, line + kLine);
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t unit = line; unit < end; ++unit)
          packed[first * units + unit * rows + row] = x[(first + row) * units + unit];
      }
    }
  }
}

/// [segments, rows] sums of x [rows, k].
at::Tensor sum_segments(const at::Tensor& x, const std::vector<Segment>& segments) {
  const at::Tensor x_f32 = x.to(at::kFloat).contiguous();
  const auto num_segments = static_cast<int64_t>(segments.size());
  at::Tensor sums = at::empty({num_segments, x.size(0)}, at::kFloat);
  for (int64_t row = 0; row < x.size(0); ++row) {
    const float* values = x_f32.const_data_ptr<float>() + row * x.size(1);
    for (int64_t s = 0; s < num_segments; ++s) {
      const Segment& segment = segments[static_cast<std::size_t>(s)];
      double sum = 0;
      for (int64_t c = segment.begin; c < segment.end; ++c) sum += values[c];
      sums.mutable_data_ptr<float>()[s * x.size(0) + row] = static_cast<float>(sum);
    }
  }
  return sums;
}

/// out (+)= total, where total is [panels, rows, kPanel].
void store_total(const at::Tensor& total, const at::Tensor& out, bool accumulate) {
  const auto store = [&](at::Tensor to, const at::Tensor& from) {
    if (accumulate)
      to.add_(from);
    else
      to.copy_(from);
  };
  const int64_t n = out.size(1), whole = n / kPanel * kPanel;
  if (whole > 0)
    store(out.narrow(1, 0, whole).unflatten(1, {-1, kPanel}),
          total.narrow(0, 0, whole / kPanel).transpose(0, 1));
  if (whole < n)
    store(out.narrow(1, whole, n - whole), total.select(0, whole / kPanel).narrow(1, 0, n - whole));
}

}  // namespace

Int8Weight::Int8Weight(const at::Tensor& values, const at::Tensor& scales,
                       const at::Tensor& zero_points, int64_t group_size, int64_t first_column)
    : group_size_(group_size), first_column_(first_column) {
  BRAID_CHECK(values.dim() == 2 && values.scalar_type() == at::kChar,
              "values must be int8 [n, k], not ", values.scalar_type(), " ", values.sizes());
  BRAID_CHECK(group_size >= 0, "group_size must not be negative, it is ", group_size);
  BRAID_CHECK(first_column >= 0, "first_column must not be negative, it is ", first_column);
  n_ = values.size(0);
  k_ = values.size(1);
  const int64_t groups = count_groups(k_, group_size, first_column);
  BRAID_CHECK(scales.scalar_type() == at::kFloat, "scales must be f32, not ", scales.scalar_type());
  const std::vector<int64_t> shape = scales.sizes().vec();
  using Shape = std::vector<int64_t>;
  if (group_size > 0) {
    BRAID_CHECK((shape == Shape{n_, groups}), "scales of the wrong shape: ", scales.sizes(),
                " for [n, groups] = [", n_, ", ", groups, "]");
  } else {
    BRAID_CHECK((shape.empty() || shape == Shape{1} || shape == Shape{n_} || shape == Shape{n_, 1}),
                "scales of the wrong shape: ", scales.sizes(), " for n = ", n_);
  }
  BRAID_CHECK(at::isfinite(scales).all().item<bool>(), "scales that are not finite");
  if (zero_points.defined()) {
    BRAID_CHECK(zero_points.scalar_type() == at::kChar || zero_points.scalar_type() == at::kFloat,
                "zero_points must be int8 or f32, not ", zero_points.scalar_type());
    BRAID_CHECK(zero_points.sizes() == scales.sizes(),
                "zero_points of the wrong shape: ", zero_points.sizes(), " for scales of shape ",
                scales.sizes());
    BRAID_CHECK(at::equal(zero_points, zero_points.round()), "zero_points that are not integers");
    zero_points_ = pack_parameters(zero_points, n_, groups, group_size);
  }
  scales_ = pack_parameters(scales, n_, groups, group_size);
  const int64_t panels = ceil_div(n_, kPanel), k_even = k_ + k_ % 2;
  values_ = at::constant_pad_nd(values, {0, k_even - k_, 0, panels * kPanel - n_})
                .reshape({panels, kPanel, k_even})
                .transpose(1, 2)
                .contiguous();
  segments_ = cut_segments(k_, group_size, first_column);
}

int64_t Int8Weight::bytes() const {
  const auto parameters = static_cast<int64_t>(scales_.nbytes());
  return static_cast<int64_t>(values_.nbytes()) + parameters * (zero_points_.defined() ? 2 : 1);
}

at::Tensor Int8Weight::unpacked_values() const {
  return values_.transpose(1, 2)
      .reshape({values_.size(0) * kPanel, values_.size(1)})
      .narrow(0, 0, n_)
      .narrow(1, 0, k_);
}

Int8Weight Int8Weight::rows(int64_t begin, int64_t length) const {
  BRAID_CHECK(begin >= 0 && length >= 0 && begin + length <= n_, "rows ", begin, " to ",
              begin + length, " of a weight with ", n_);
  const auto slice = [&](const at::Tensor& packed) {
    return packed.defined() ? packed.narrow(1, begin, length).t() : at::Tensor();
  };
  return Int8Weight(unpacked_values().narrow(0, begin, length), slice(scales_), slice(zero_points_),
                    group_size_, first_column_);
}

Int8Weight Int8Weight::columns(int64_t begin, int64_t length) const {
  BRAID_CHECK(begin >= 0 && length >= 0 && begin + length <= k_, "columns ", begin, " to ",
              begin + length, " of a weight with ", k_);
  const int64_t first = first_column_ + begin;
  const int64_t first_group =
      group_size_ == 0 || length == 0 ? 0 : first / group_size_ - first_column_ / group_size_;
  const auto slice = [&](const at::Tensor& packed) {
    if (!packed.defined()) return at::Tensor();
    return packed.narrow(1, 0, n_)
        .narrow(0, first_group, count_groups(length, group_size_, first))
        .t();
  };
  return Int8Weight(unpacked_values().narrow(1, begin, length), slice(scales_), slice(zero_points_),
                    group_size_, first);
}

at::Tensor Int8Weight::dequantize(at::ScalarType dtype) const {
  const at::ScalarType exact = dtype == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor weight = unpacked_values().to(exact);
  const at::Tensor groups = at::empty({k_}, at::kLong);
  for (const Segment& segment : segments_)
    groups.slice(0, segment.begin, segment.end).fill_(segment.group);
  const auto parameters = [&](const at::Tensor& packed) {
    return packed.narrow(1, 0, n_).to(exact).index_select(0, groups).t();
  };
  if (zero_points_.defined()) weight.sub_(parameters(zero_points_));
  weight.mul_(parameters(scales_));
  return weight.to(dtype);
}

void Int8Weight::multiply(const at::Tensor& x, at::Tensor out, bool accumulate,
                          const int8::Kernel& kernel) const {
  const trace::Span span(trace::Kind::compute, "int8_matmul");
  BRAID_CHECK(x.dim() == 2 && x.size(1) == k_, "x must be [m, ", k_, "], not ", x.sizes());
  BRAID_CHECK(is_activation(x.scalar_type()), "x must be f32, bf16 or fp16, not ", x.scalar_type());
  const int64_t m = x.size(0);
  BRAID_CHECK(out.dim() == 2 && out.size(0) == m && out.size(1) == n_, "out must be [", m, ", ", n_,
              "], not ", out.sizes());
  BRAID_CHECK(out.scalar_type() == at::kFloat || (out.scalar_type() == x.scalar_type()),
              "out must be f32 or in x's dtype, ", x.scalar_type(), ", not ", out.scalar_type());
  BRAID_CHECK(!accumulate || out.scalar_type() == at::kFloat, "accumulate needs an f32 out, not ",
              out.scalar_type());
  BRAID_CHECK(out.stride(1) == 1 || n_ <= 1, "out must have unit stride in its columns, not ",
              out.stride(1));
  if (n_ == 0) return;
  for (int64_t begin = 0; begin < m; begin += kTileRows) {
    const int64_t rows = std::min(kTileRows, m - begin);
    multiply_tile(x.narrow(0, begin, rows), out.narrow(0, begin, rows), accumulate, kernel);
  }
}

void Int8Weight::multiply_tile(const at::Tensor& x, at::Tensor out, bool accumulate,
                               const int8::Kernel& kernel) const {
  const bool pairs = kernel.multiply_bf16 != nullptr && x.scalar_type() == at::kBFloat16 &&
                     std::all_of(segments_.begin(), segments_.end(),
                                 [](const Segment& segment) { return segment.begin % 2 == 0; });
  const int64_t rows = x.size(0), panels = values_.size(0), k_even = values_.size(1);
  at::Tensor x_tile = x.to(pairs ? at::kBFloat16 : at::kFloat);
  if (k_even > k_) x_tile = at::constant_pad_nd(x_tile, {0, 1});
  x_tile = x_tile.contiguous();
  const int64_t units = pairs ? k_even / 2 : k_even;
  const at::Tensor packed = at::empty({rows * units}, at::kInt);
  const at::Tensor sums = zero_points_.defined() ? sum_segments(x, segments_) : at::Tensor();
  const at::Tensor total = at::zeros({panels, rows, kPanel}, at::kFloat);

  const int8::Product product{
      .values = values_.const_data_ptr<std::int8_t>(),
      .scales = scales_.const_data_ptr<float>(),
      .zero_points = zero_points_.defined() ? zero_points_.const_data_ptr<float>() : nullptr,
      .x = packed.const_data_ptr(),
      .x_sums = sums.defined() ? sums.const_data_ptr<float>() : nullptr,
      .total = total.mutable_data_ptr<float>(),
      .segments = segments_.data(),
      .num_segments = static_cast<int64_t>(segments_.size()),
      .num_panels = panels,
      .rows = rows,
      .num_blocks = ceil_div(rows, kernel.block_rows),
      .k_even = k_even};
  pack_rows(static_cast<const std::uint32_t*>(x_tile.const_data_ptr()), units, product,
            static_cast<std::uint32_t*>(packed.mutable_data_ptr()));
  const int64_t panels_a_thread = ceil_div(kThreadProducts, rows * k_even * kPanel + 1);
  at::parallel_for(0, panels, panels_a_thread, [&](int64_t begin, int64_t end) {
    (pairs ? kernel.multiply_bf16 : kernel.multiply_f32)(product, begin, end);
  });
  store_total(total, out, accumulate);
}

Int8Weight quantize_weight(const at::Tensor& weight, QuantizeOptions options) {
  BRAID_CHECK(weight.dim() == 2, "weight must be [n, k], not ", weight.sizes());
  BRAID_CHECK(is_activation(weight.scalar_type()), "weight must be f32, bf16 or fp16, not ",
              weight.scalar_type());
  const bool grouped = options.granularity == Granularity::group;
  BRAID_CHECK(!grouped || options.group_size >= 1, "group_size must be at least 1, it is ",
              options.group_size);
  const int64_t n = weight.size(0), k = weight.size(1);
  const int64_t group_size = grouped ? options.group_size : 0;
  const int64_t groups = count_groups(k, group_size, 0);
  const int64_t width = std::max<int64_t>(1, grouped ? std::min(group_size, k) : k);

  // Zeros beside the weight change neither its groups' ranges, which include 0, nor their values.
  const at::Tensor padded = at::constant_pad_nd(weight.to(at::kFloat), {0, groups * width - k})
                                .reshape({n, groups, width});
  at::Tensor low = padded.amin(2, true).clamp_max(0), high = padded.amax(2, true).clamp_min(0);
  if (options.granularity == Granularity::tensor && n > 0) {
    low = low.amin(0, true);
    high = high.amax(0, true);
  }
  BRAID_CHECK(at::isfinite(low).all().item<bool>() && at::isfinite(high).all().item<bool>(),
              "a weight that is not finite");
  constexpr float kSmallest = std::numeric_limits<float>::min();
  at::Tensor scales, zero_points;
  at::Tensor values = padded;
  if (options.symmetric) {
    scales = (at::maximum(-low, high) / 127).clamp_min(kSmallest);
    values = (padded / scales).round();
  } else {
    scales = (high / 255 - low / 255).clamp_min(kSmallest);
    zero_points = (-128 - low / scales).round();
    values = (padded / scales).round_().add_(zero_points);
  }
  values = values.clamp_(-128, 127).to(at::kChar).reshape({n, groups * width}).narrow(1, 0, k);
  const auto parameters = [&](const at::Tensor& t) {
    if (!t.defined()) return t;
    return options.granularity == Granularity::tensor ? t.reshape({-1}) : t.squeeze(2);
  };
  return Int8Weight(values, parameters(scales), parameters(zero_points), group_size);
}

}  // namespace braid
