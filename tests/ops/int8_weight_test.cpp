// Int8 weights: products on every instruction set that this CPU has, slices and quantization, against f64.
#include "braid/ops/int8_weight.h"

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/support/errors.h"

namespace braid {
namespace {

using std::int64_t;

constexpr auto kTypes = {at::kFloat, at::kBFloat16, at::kHalf};

/// On one thread: products as small as these spend their time in barriers otherwise.
class Int8WeightTest : public testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
  void TearDown() override { at::set_num_threads(threads_); }

 private:
  const int threads_ = at::get_num_threads();
};

/// The parts of a weight, and what they mean element by element.
struct Parts {
  at::Tensor values, scales, zero_points;
  int64_t group_size = 0, first_column = 0;

  Int8Weight weight() const {
    return Int8Weight(values, scales, zero_points, group_size, first_column);
  }

  at::Tensor dense() const {
    const int64_t n = values.size(0), k = values.size(1);
    const auto parameter = [&](const at::Tensor& t, int64_t i, int64_t j) {
      const int64_t group =
          group_size == 0 ? 0 : (first_column + j) / group_size - first_column / group_size;
      const int64_t index = group_size > 0 ? i * t.size(1) + group : t.numel() == 1 ? 0 : i;
      return t.const_data_ptr<double>()[index];
    };
    const at::Tensor zeros = zero_points.defined() ? zero_points : at::zeros_like(scales);
    const at::Tensor scales_f64 = scales.to(at::kDouble), zeros_f64 = zeros.to(at::kDouble);
    at::Tensor result = values.to(at::kDouble);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < k; ++j) {
        double& element = result.mutable_data_ptr<double>()[i * k + j];
        element = (element - parameter(zeros_f64, i, j)) * parameter(scales_f64, i, j);
      }
    }
    return result;
  }
};

struct Form {
  std::vector<int64_t> shape;  // of scales; n stands for itself
  int64_t group_size, first_column;
};
constexpr int64_t kN = -1, kGroups = -2;
const std::vector<Form> kForms = {{{}, 0, 0},
                                  {{1}, 0, 0},
                                  {{kN}, 0, 0},
                                  {{kN, 1}, 0, 5},
                                  {{kN, kGroups}, 1, 0},
                                  {{kN, kGroups}, 7, 0},
                                  {{kN, kGroups}, 7, 10},
                                  {{kN, kGroups}, 32, 0},
                                  {{kN, kGroups}, 32, 31},
                                  {{kN, kGroups}, 128, 192},
                                  {{kN, kGroups}, 1000, 0},
                                  {{kN, kGroups}, 1000, 900}};

/// Values and zero points over their whole ranges; scales are powers of 2, so that products with
/// small integers are exact in f32.
Parts make_parts(int64_t n, int64_t k, const Form& form, bool with_zero_points) {
  Parts parts;
  parts.group_size = form.group_size;
  parts.first_column = form.first_column;
  parts.values = at::randint(-128, 128, {n, k}).to(at::kChar);
  std::vector<int64_t> shape = form.shape;
  for (int64_t& size : shape) {
    if (size == kN) size = n;
    if (size == kGroups) {
      size = 0;
      for (int64_t j = 0; j < k; ++j)  // counted one by one
        size += j == 0 || (form.first_column + j) % form.group_size == 0;
    }
  }
  parts.scales = at::pow(2, at::randint(-3, 1, shape).to(at::kFloat));
  if (with_zero_points) parts.zero_points = at::randint(-128, 128, shape).to(at::kChar);
  return parts;
}

constexpr float kUnwritten = std::numeric_limits<float>::quiet_NaN();

/// A view of `whole`, [m, n] in the middle of [m, n + 5] full of NaN.
struct Poisoned {
  at::Tensor whole, out;
  Poisoned(int64_t m, int64_t n, at::ScalarType dtype)
      : whole(at::full({m, n + 5}, kUnwritten, dtype)), out(whole.narrow(1, 2, n)) {}
  void expect_border_kept() const {
    EXPECT_TRUE(at::isnan(whole.narrow(1, 0, 2)).all().item<bool>());
    EXPECT_TRUE(at::isnan(whole.narrow(1, whole.size(1) - 3, 3)).all().item<bool>());
  }
};

TEST_F(Int8WeightTest, IntegersAreExactForEveryKernelAndShape) {
  at::manual_seed(1);
  int64_t weights = 0, products = 0;
  for (const int8::Kernel& kernel : int8::kernels()) {
    for (const int64_t k : {0, 1, 3, 31, 32, 100, 257, 600}) {
      for (std::size_t i = 0; i < 2 * kForms.size(); ++i) {
        const Form& form = kForms[i / 2];
        const bool with_zero_points = i % 2 == 1;
        const int64_t n = std::array{1, 7, 32, 33, 100}[static_cast<std::size_t>(++weights % 5)];
        const Parts parts = make_parts(n, k, form, with_zero_points);
        const Int8Weight weight = parts.weight();
        const at::Tensor dense = parts.dense();
        ASSERT_TRUE(at::equal(weight.dequantize(at::kDouble), dense));
        for (const int64_t m : {0, 1, 2, 3, 5, 8, 9, 16, 17, 64, 65, 130}) {
          const at::ScalarType dtype = std::data(kTypes)[(weights + ++products) % 3];
          SCOPED_TRACE(testing::Message()
                       << kernel.name << " " << dtype << " m " << m << " n " << n << " k " << k
                       << " group_size " << form.group_size << " first_column " << form.first_column
                       << " zero points " << with_zero_points);
          at::Tensor x = at::randint(-3, 4, {m, k}).to(dtype);
          if (products % 5 == 0) x = x.t().contiguous().t();
          const at::Tensor expected = at::mm(x.to(at::kDouble), dense.t());
          const Poisoned f32(m, n, at::kFloat);
          weight.multiply(x, f32.out, false, kernel);
          ASSERT_TRUE(at::equal(f32.out.to(at::kDouble), expected));
          weight.multiply(x, f32.out, true, kernel);
          ASSERT_TRUE(at::equal(f32.out.to(at::kDouble), 2 * expected));
          f32.expect_border_kept();
          const Poisoned same(m, n, dtype);
          weight.multiply(x, same.out, false, kernel);
          ASSERT_TRUE(at::equal(same.out, expected.to(at::kFloat).to(dtype)));
          same.expect_border_kept();
        }
      }
    }
  }
}

TEST_F(Int8WeightTest, RealNumbersWithinOneRoundingOfTheOutput) {
  at::manual_seed(2);
  for (const int8::Kernel& kernel : int8::kernels()) {
    for (const auto dtype : kTypes) {
      for (const Form& form : kForms) {
        for (const int64_t m : {1, 5, 70}) {
          const bool with_zero_points = m == 5;
          Parts parts = make_parts(70, 1030, form, with_zero_points);
          parts.scales.mul_(at::rand_like(parts.scales));
          const Int8Weight weight = parts.weight();
          const at::Tensor dense = weight.dequantize(at::kDouble);
          const at::Tensor x = at::randn({m, 1030}).to(dtype);
          const at::Tensor expected = at::mm(x.to(at::kDouble), dense.t());
          const double most = with_zero_points ? 128 * parts.scales.max().item<double>() : 0;
          // Sums in f32 err by what their terms are worth, not by what is left of them.
          const at::Tensor terms = at::mm(x.to(at::kDouble).abs(), (dense.abs() + most).t());
          const auto expect_within = [&](const at::Tensor& y, double rounding) {
            const at::Tensor bound = expected.abs() * rounding + terms * 1e-6;
            EXPECT_TRUE(((y.to(at::kDouble) - expected).abs() <= bound).all().item<bool>())
                << kernel.name << " " << dtype << " m " << m << " group_size " << form.group_size;
          };
          at::Tensor y = at::full({m, 70}, kUnwritten, dtype);
          weight.multiply(x, y, false, kernel);
          expect_within(y, dtype == at::kBFloat16 ? 0x1p-8
                           : dtype == at::kHalf   ? 0x1p-11
                                                  : 0x1p-24);
          at::Tensor sum = at::ones({m, 70});
          weight.multiply(x, sum, true, kernel);
          expect_within(sum - 1, 1e-6);
        }
      }
    }
  }
}

TEST_F(Int8WeightTest, BitsOfARowDependOnNeitherOtherRowsNorThreads) {
  at::manual_seed(3);
  const Int8Weight weight = make_parts(300, 700, {{kN, kGroups}, 128, 0}, true).weight();
  for (const int8::Kernel& kernel : int8::kernels()) {
    for (const auto dtype : kTypes) {
      const at::Tensor x = at::randn({600, 700}).to(dtype);
      at::Tensor whole = at::empty({600, 300}), row = at::empty({1, 300}),
                 few = at::empty({9, 300});
      at::set_num_threads(3);
      weight.multiply(x, whole, false, kernel);
      at::set_num_threads(1);
      for (const int64_t i : {0, 5, 511, 512, 599}) {
        weight.multiply(x.narrow(0, i, 1), row, false, kernel);
        EXPECT_TRUE(at::equal(row, whole.narrow(0, i, 1)))
            << kernel.name << " " << dtype << " row " << i;
      }
      weight.multiply(x.narrow(0, 100, 9), few, false, kernel);
      EXPECT_TRUE(at::equal(few, whole.narrow(0, 100, 9)));
    }
  }
}

TEST_F(Int8WeightTest, NotANumberStaysInItsRow) {
  at::manual_seed(4);
  for (const int8::Kernel& kernel : int8::kernels()) {
    for (const auto dtype : kTypes) {
      for (const bool with_zero_points : {false, true}) {
        const Int8Weight weight = make_parts(40, 51, {{kN}, 0, 0}, with_zero_points).weight();
        at::Tensor x = at::randn({30, 51}).to(dtype);
        at::Tensor clean = at::empty({30, 40}, dtype), y = at::empty({30, 40}, dtype);
        weight.multiply(x, clean, false, kernel);
        x[7][50] = std::numeric_limits<float>::quiet_NaN();
        x[20][0] = std::numeric_limits<float>::infinity();
        weight.multiply(x, y, false, kernel);
        for (int64_t row = 0; row < 30; ++row) {
          if (row == 7 || row == 20)
            EXPECT_FALSE(at::isfinite(y[row]).any().item<bool>());
          else
            EXPECT_TRUE(at::equal(y[row], clean[row])) << kernel.name << " row " << row;
        }
      }
    }
  }
}

TEST_F(Int8WeightTest, SlicesAreThoseOfTheWholeWeight) {
  at::manual_seed(5);
  for (const Form& form : kForms) {
    const Parts parts = make_parts(70, 100, form, true);
    const Int8Weight whole = parts.weight();
    const at::Tensor dense = parts.dense();
    const at::Tensor x = at::randint(-3, 4, {6, 100}).to(at::kBFloat16);
    at::Tensor sum = at::zeros({6, 70}), y = at::empty({6, 70});
    int64_t begin = 0;
    for (const int64_t length : {33, 0, 1, 30, 36}) {
      const Int8Weight shard = whole.columns(begin, length);
      EXPECT_EQ(shard.n(), 70);
      EXPECT_EQ(shard.k(), length);
      EXPECT_TRUE(at::equal(shard.dequantize(at::kDouble), dense.narrow(1, begin, length)));
      shard.multiply(x.narrow(1, begin, length), sum, true);
      begin += length;
    }
    whole.multiply(x, y, false);
    EXPECT_TRUE(at::equal(sum, y));

    EXPECT_TRUE(at::equal(
        whole.columns(9, 80).columns(11, 50).rows(31, 39).rows(1, 3).dequantize(at::kDouble),
        dense.narrow(1, 20, 50).narrow(0, 32, 3)));
    for (const auto& [first, rows] : {std::pair{0, 33}, {33, 37}, {70, 0}}) {
      const Int8Weight shard = whole.rows(first, rows);
      at::Tensor part = at::empty({6, rows});
      shard.multiply(x, part, false);
      EXPECT_TRUE(at::equal(part, y.narrow(1, first, rows)));
    }
    EXPECT_THROW((void)whole.rows(60, 11), c10::ValueError);
    EXPECT_THROW((void)whole.columns(-1, 5), c10::ValueError);
  }
}

TEST_F(Int8WeightTest, TakesAnyStrides) {
  at::manual_seed(7);
  const Parts parts = make_parts(64, 96, {{kN, kGroups}, 32, 0}, true);
  const auto turned = [](const at::Tensor& t) { return t.t().contiguous().t(); };
  const Int8Weight weight(turned(parts.values), turned(parts.scales), turned(parts.zero_points),
                          32);
  EXPECT_TRUE(at::equal(weight.dequantize(at::kDouble), parts.dense()));
  const at::Tensor dense = at::randn({64, 96});
  for (const auto granularity : {Granularity::tensor, Granularity::channel, Granularity::group}) {
    const QuantizeOptions options{granularity, 32, false};
    EXPECT_TRUE(at::equal(quantize_weight(turned(dense), options).dequantize(at::kFloat),
                          quantize_weight(dense, options).dequantize(at::kFloat)));
  }
}

TEST_F(Int8WeightTest, KeepsOneByteAValue) {
  const int64_t n = 64, k = 256;
  const at::Tensor values = at::zeros({n, k}, at::kChar);
  EXPECT_EQ(Int8Weight(values, at::ones({n})).bytes(), n * k + 4 * n);
  EXPECT_EQ(Int8Weight(values, at::ones({n, 2}), at::zeros({n, 2}), 128).bytes(),
            n * k + 2 * 4 * n * 2);
}

TEST_F(Int8WeightTest, QuantizedWithinHalfAStep) {
  at::manual_seed(6);
  for (const auto dtype : kTypes) {
    for (const bool symmetric : {true, false}) {
      for (const auto granularity :
           {Granularity::tensor, Granularity::channel, Granularity::group}) {
        for (const int64_t group_size : {1, 7, 32, 100, 500}) {
          at::Tensor weight = at::randn({40, 100});
          weight[3] = 0;
          weight[4] = 2.5;
          weight[5] = -1e-30;
          weight[6].abs_().add_(4);
          weight[7][50] = 1000;
          weight = weight.to(dtype);
          const Int8Weight quantized =
              quantize_weight(weight, {granularity, group_size, symmetric});
          const at::Tensor exact = weight.to(at::kDouble);
          // The range of the elements that share a scale, found one group at a time.
          const int64_t width = granularity == Granularity::group ? group_size : 100;
          at::Tensor range = at::empty_like(exact);
          for (int64_t begin = 0; begin < 100; begin += width) {
            const at::Tensor part = exact.narrow(1, begin, std::min(width, 100 - begin));
            const at::Tensor high = part.amax(1, true).clamp_min(0),
                             low = part.amin(1, true).clamp_max(0);
            range.narrow(1, begin, part.size(1))
                .copy_(symmetric ? 2 * at::maximum(high, -low) * 255 / 254 : high - low);
          }
          if (granularity == Granularity::tensor)
            range.fill_(symmetric ? 2 * exact.abs().max().item<double>() * 255 / 254
                                  : exact.max().item<double>() - exact.min().item<double>());
          const at::Tensor error = (quantized.dequantize(at::kDouble) - exact).abs();
          EXPECT_TRUE((error <= range / 255 * (0.5 + 1e-4) + 1e-37).all().item<bool>())
              << dtype << " group_size " << group_size << " symmetric " << symmetric;
          EXPECT_TRUE((quantized.dequantize(at::kDouble)[3] == 0).all().item<bool>());
        }
      }
    }
  }
  EXPECT_EQ(quantize_weight(at::zeros({3, 0}), {Granularity::group}).k(), 0);
  EXPECT_EQ(quantize_weight(at::zeros({0, 3}), {Granularity::tensor}).n(), 0);
}

TEST_F(Int8WeightTest, TellsWhatDoesNotFit) {
  using testing::HasSubstr;
  const at::Tensor values = at::zeros({4, 6}, at::kChar), scales = at::ones({4});
  const auto make = [&](const at::Tensor& s, const at::Tensor& z = {}, int64_t group_size = 0,
                        int64_t first_column = 0) {
    return test::value_error([&] { Int8Weight(values, s, z, group_size, first_column); });
  };
  EXPECT_THAT(make(at::ones({6})), HasSubstr("scales of the wrong shape: [6] for n = 4"));
  EXPECT_THAT(make(at::ones({4, 2}), {}, 2),
              HasSubstr("scales of the wrong shape: [4, 2] for [n, groups] = [4, 3]"));
  EXPECT_THAT(make(at::ones({4, 3}), {}, 2, 1), HasSubstr("[n, groups] = [4, 4]"));
  EXPECT_THAT(make(scales, {}, -1), HasSubstr("group_size"));
  EXPECT_THAT(make(scales, {}, 0, -2), HasSubstr("first_column"));
  EXPECT_THAT(make(scales.to(at::kHalf)), HasSubstr("scales must be f32, not Half"));
  EXPECT_THAT(make(scales / 0), HasSubstr("finite"));
  EXPECT_THAT(make(scales, at::ones({4, 1})),
              HasSubstr("zero_points of the wrong shape: [4, 1] for scales of shape [4]"));
  EXPECT_THAT(make(scales, scales / 2), HasSubstr("integers"));
  EXPECT_THAT(make(scales, scales.to(at::kInt)),
              HasSubstr("zero_points must be int8 or f32, not Int"));
  EXPECT_THAT(test::value_error([&] { Int8Weight(values.to(at::kInt), scales); }),
              HasSubstr("values must be int8"));

  const Int8Weight weight(values, scales);
  const auto multiply = [&](const at::Tensor& x, const at::Tensor& out, bool accumulate = false) {
    return test::value_error([&] { weight.multiply(x, out, accumulate); });
  };
  const at::Tensor x = at::ones({2, 6}), out = at::empty({2, 4});
  EXPECT_THAT(multiply(at::ones({2, 5}), out), HasSubstr("x must be [m, 6], not [2, 5]"));
  EXPECT_THAT(multiply(x.to(at::kDouble), out), HasSubstr("not Double"));
  EXPECT_THAT(multiply(x, at::empty({4, 2})), HasSubstr("out must be [2, 4], not [4, 2]"));
  EXPECT_THAT(multiply(x, out.to(at::kHalf)), HasSubstr("not Half"));
  EXPECT_THAT(multiply(x.to(at::kHalf), out.to(at::kHalf), true), HasSubstr("accumulate"));
  EXPECT_THAT(multiply(x, at::empty({4, 2}).t()), HasSubstr("unit stride"));

  EXPECT_THROW((void)quantize_weight(at::ones({3})), c10::ValueError);
  EXPECT_THROW((void)quantize_weight(at::ones({3, 3}, at::kDouble)), c10::ValueError);
  EXPECT_THROW((void)quantize_weight(at::ones({3, 3}), {Granularity::group, 0}), c10::ValueError);
  for (const double bad : {NAN, INFINITY, -INFINITY}) {
    at::Tensor weight_with_bad = at::ones({3, 3});
    weight_with_bad[1][2] = bad;
    EXPECT_THAT(test::value_error([&] { (void)quantize_weight(weight_with_bad); }),
                HasSubstr("not finite"));
  }
}

}  // namespace
}  // namespace braid
