// The row loops, compiled for several instruction sets.
#include "braid/layers/row_kernels.h"

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "braid/core/check.h"

// One version of each loop for every level of x86-64, chosen when the program starts. Sanitizers
// instrument the chooser, which runs before they are ready.
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define BRAID_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define BRAID_CLONES
#endif
#define BRAID_INLINE inline __attribute__((always_inline))

namespace braid::row_kernels {
namespace {

using std::int64_t;
using BFloat16 = c10::BFloat16;

BRAID_INLINE float load(const float* p, int64_t i) { return p[i]; }
BRAID_INLINE float load(const BFloat16* p, int64_t i) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(p[i].x) << 16);
}
BRAID_INLINE void store(float* p, int64_t i, float value) { p[i] = value; }
BRAID_INLINE void store(BFloat16* p, int64_t i, float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded =
      (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;  // to nearest, ties to even
  p[i].x = static_cast<std::uint16_t>((bits & 0x7fffffffU) > 0x7f800000U ? 0x7fc0U : rounded);
}

/// exp(x) to 2 units in the last place, 0 below -87; by a polynomial, so that the loop around it
/// stays one of vectors.
BRAID_INLINE float exponential(float x) {
  constexpr float kLog2E = 1.44269504088896341F, kLn2High = 0.693359375F, kLn2Low = -2.12194440e-4F;
  constexpr float kShift =
      12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
  const float clamped = x < -87.0F ? -87.0F : (x > 88.0F ? 88.0F : x);
  const float shifted = clamped * kLog2E + kShift;
  const float n = shifted - kShift;
  const float r = (clamped - n * kLn2High) - n * kLn2Low;
  float p = 1.9875691500e-4F;
  p = p * r + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  p = p * r * r + r + 1.0F;
  const auto power = std::bit_cast<std::uint32_t>(shifted) << 23;  // n in the exponent's place
  const float result = std::bit_cast<float>(std::bit_cast<std::uint32_t>(p) + power);
  return x < -87.0F ? 0.0F : result;
}

template <class T>
struct NormRows {
  const T *x, *delta, *weight;
  T *sum, *y;
  float* inverse_rms;
  int64_t h;
  float epsilon;
};

template <class T>
BRAID_CLONES void norm_rows(const NormRows<T>& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = a.x + row * a.h;
    float squares = 0;
    if (a.delta != nullptr) {
      const T* delta = a.delta + row * a.h;
      T* sum = a.sum + row * a.h;
#pragma omp simd reduction(+ : squares)
      for (int64_t i = 0; i < a.h; ++i) {
        store(sum, i, load(x, i) + load(delta, i));
        const float value = load(sum, i);
        squares += value * value;
      }
      x = sum;
    } else {
#pragma omp simd reduction(+ : squares)
      for (int64_t i = 0; i < a.h; ++i) squares += load(x, i) * load(x, i);
    }
    const float inverse = 1.0F / std::sqrt(squares / static_cast<float>(a.h) + a.epsilon);
    a.inverse_rms[row] = inverse;
    T* y = a.y + row * a.h;
#pragma omp simd
    for (int64_t i = 0; i < a.h; ++i) store(y, i, load(x, i) * inverse * load(a.weight, i));
  }
}

template <class T>
struct NormBackward {
  const T *dy, *dsum, *x, *weight;
  const float* inverse_rms;
  T* dx;
  int64_t h;
};

/// dweight: this thread's part, or null.
template <class T>
BRAID_CLONES void norm_backward(const NormBackward<T>& a, float* dweight, int64_t begin,
                                int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T *dy = a.dy + row * a.h, *x = a.x + row * a.h;
    const float inverse = a.inverse_rms[row];
    float dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t i = 0; i < a.h; ++i) dot += load(dy, i) * load(a.weight, i) * load(x, i);
    const float along = dot * inverse * inverse * inverse / static_cast<float>(a.h);
    T* dx = a.dx + row * a.h;
    if (a.dsum != nullptr) {
      const T* dsum = a.dsum + row * a.h;
#pragma omp simd
      for (int64_t i = 0; i < a.h; ++i) {
        store(dx, i,
              load(dsum, i) + load(dy, i) * load(a.weight, i) * inverse - load(x, i) * along);
      }
    } else {
#pragma omp simd
      for (int64_t i = 0; i < a.h; ++i) {
        store(dx, i, load(dy, i) * load(a.weight, i) * inverse - load(x, i) * along);
      }
    }
    if (dweight == nullptr) continue;
#pragma omp simd
    for (int64_t i = 0; i < a.h; ++i) dweight[i] += load(dy, i) * load(x, i) * inverse;
  }
}

/// Turns pairs (i, i + half) by the angle; sign -1 turns back.
template <class From, class To>
BRAID_INLINE void rotate(const From* from, To* to, const float* cosine, const float* sine,
                         float sign, int64_t half) {
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float a = load(from, i), b = load(from, i + half), c = cosine[i], s = sign * sine[i];
    store(to, i, a * c - b * s);
    store(to, i + half, b * c + a * s);
  }
}

struct HeadStrides {
  int64_t batch, head, position;
};

/// Heads of all tokens, from one layout to the other; token p * b + i is position p of sequence i.
template <class From, class To>
struct HeadMove {
  const From* from;
  To* to;
  HeadStrides from_strides, to_strides;
  const float *cosine, *sine;
  float sign;
  int64_t b, num_heads, num_rotated, d;
};

template <class From, class To>
BRAID_CLONES void move_heads(const HeadMove<From, To>& a, int64_t begin, int64_t end) {
  const int64_t half = a.d / 2;
  for (int64_t token = begin; token < end; ++token) {
    const int64_t position = token / a.b, batch = token % a.b;
    const float *cosine = a.cosine + position * half, *sine = a.sine + position * half;
    const From* from = a.from + batch * a.from_strides.batch + position * a.from_strides.position;
    To* to = a.to + batch * a.to_strides.batch + position * a.to_strides.position;
    for (int64_t head = 0; head < a.num_heads; ++head) {
      if (head < a.num_rotated) {
        rotate(from, to, cosine, sine, a.sign, half);
      } else {
#pragma omp simd
        for (int64_t i = 0; i < a.d; ++i) store(to, i, load(from, i));
      }
      from += a.from_strides.head;
      to += a.to_strides.head;
    }
  }
}

template <class T>
BRAID_CLONES void swiglu_rows(const T* gate_up, T* y, int64_t f, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T *gate = gate_up + row * 2 * f, *up = gate + f;
    T* out = y + row * f;
#pragma omp simd
    for (int64_t i = 0; i < f; ++i) {
      const float g = load(gate, i);
      store(out, i, g / (1.0F + exponential(-g)) * load(up, i));
    }
  }
}

template <class T>
BRAID_CLONES void swiglu_backward_rows(const T* dy, const T* gate_up, T* dgate_up, int64_t f,
                                       int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T *gate = gate_up + row * 2 * f, *up = gate + f, *d = dy + row * f;
    T *dgate = dgate_up + row * 2 * f, *dup = dgate + f;
#pragma omp simd
    for (int64_t i = 0; i < f; ++i) {
      const float g = load(gate, i), u = load(up, i), gradient = load(d, i);
      const float sigmoid = 1.0F / (1.0F + exponential(-g));
      store(dgate, i, gradient * u * sigmoid * (1.0F + g * (1.0F - sigmoid)));
      store(dup, i, gradient * g * sigmoid);
    }
  }
}

template <class T>
BRAID_CLONES void statistics_rows(const T* logits, int64_t v, float* maximum, float* sum,
                                  int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = logits + row * v;
    float largest = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < v; ++i) largest = load(x, i) > largest ? load(x, i) : largest;
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < v; ++i) total += exponential(load(x, i) - largest);
    maximum[row] = largest;
    sum[row] = total;
  }
}

template <class T>
BRAID_CLONES void softmax_rows(T* logits, int64_t v, const float* log_sum, float scale,
                               int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    T* x = logits + row * v;
    const float shift = log_sum[row];
#pragma omp simd
    for (int64_t i = 0; i < v; ++i) store(x, i, scale * exponential(load(x, i) - shift));
  }
}

template <class To, class From>
BRAID_CLONES void add_row(To* to, const From* from, int64_t h) {
#pragma omp simd
  for (int64_t i = 0; i < h; ++i) store(to, i, load(to, i) + load(from, i));
}

template <class T>
T* data(const at::Tensor& x) {
  return x.defined() ? x.data_ptr<T>() : nullptr;
}

/// Calls fn(T{}) for the type T of x's values.
template <class Fn>
void with_type_of(const at::Tensor& x, const Fn& fn) {
  BRAID_CHECK(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16,
              "layers compute in f32 or bf16, not in ", x.scalar_type());
  x.scalar_type() == at::kFloat ? fn(float{}) : fn(BFloat16{});
}

template <class Fn>
void with_types_of(const at::Tensor& x, const at::Tensor& y, const Fn& fn) {
  with_type_of(x, [&]<class X>(X a) { with_type_of(y, [&]<class Y>(Y b) { fn(a, b); }); });
}

/// Calls fn(begin, end) over row ranges that are worth a thread.
template <class Fn>
void for_rows(int64_t rows, int64_t row_elements, const Fn& fn) {
  at::parallel_for(0, rows, std::max<int64_t>(1, 32768 / std::max<int64_t>(1, row_elements)), fn);
}

}  // namespace

void add_rms_norm(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight,
                  double epsilon, at::Tensor& sum, at::Tensor& y, at::Tensor& inverse_rms) {
  with_type_of(x, [&]<class T>(T) {
    const NormRows<T> a{data<T>(x),      data<T>(delta),
                        data<T>(weight), data<T>(sum),
                        data<T>(y),      inverse_rms.data_ptr<float>(),
                        x.size(1),       static_cast<float>(epsilon)};
    for_rows(x.size(0), x.size(1), [&](int64_t begin, int64_t end) { norm_rows(a, begin, end); });
  });
}

void rms_norm_backward(const at::Tensor& dy, const at::Tensor& dsum, const at::Tensor& x,
                       const at::Tensor& weight, const at::Tensor& inverse_rms, at::Tensor& dx,
                       const at::Tensor& dweight) {
  with_type_of(x, [&]<class T>(T) {
    const NormBackward<T> a{
        data<T>(dy), data<T>(dsum), data<T>(x), data<T>(weight), inverse_rms.data_ptr<float>(),
        data<T>(dx), x.size(1)};
    // Each thread sums its rows; the parts are then added in order, so that a run repeats to the bit.
    std::vector<std::vector<float>> parts(dweight.defined() ? at::get_num_threads() : 0,
                                          std::vector<float>(a.h));
    for_rows(x.size(0), x.size(1), [&](int64_t begin, int64_t end) {
      norm_backward(a, parts.empty() ? nullptr : parts.at(at::get_thread_num()).data(), begin, end);
    });
    for (const auto& part : parts) add_row(dweight.data_ptr<float>(), part.data(), a.h);
  });
}

namespace {

HeadStrides strides_of_heads(const at::Tensor& heads) {
  return {heads.stride(0), heads.stride(1), heads.stride(2)};
}

/// Rows of b sequences side by side.
HeadStrides strides_of_rows(const at::Tensor& rows, const at::Tensor& heads) {
  return {rows.stride(0), heads.size(3), heads.size(0) * rows.stride(0)};
}

}  // namespace

void rotate_to_heads(const at::Tensor& rows, const at::Tensor& cosine, const at::Tensor& sine,
                     int64_t num_rotated, at::Tensor& heads) {
  with_types_of(rows, heads, [&]<class From, class To>(From, To) {
    const HeadMove<From, To> a{data<From>(rows),
                               data<To>(heads),
                               strides_of_rows(rows, heads),
                               strides_of_heads(heads),
                               data<float>(cosine),
                               data<float>(sine),
                               1.0F,
                               heads.size(0),
                               heads.size(1),
                               num_rotated,
                               heads.size(3)};
    for_rows(rows.size(0), rows.size(1),
             [&](int64_t begin, int64_t end) { move_heads(a, begin, end); });
  });
}

void rotate_from_heads(const at::Tensor& heads, const at::Tensor& cosine, const at::Tensor& sine,
                       bool rotated, int64_t begin_head, at::Tensor& rows) {
  with_types_of(heads, rows, [&]<class From, class To>(From, To) {
    const auto num_heads = heads.size(1), d = heads.size(3);
    const HeadMove<From, To> a{data<From>(heads),
                               data<To>(rows) + begin_head * d,
                               strides_of_heads(heads),
                               strides_of_rows(rows, heads),
                               data<float>(cosine),
                               data<float>(sine),
                               -1.0F,
                               heads.size(0),
                               num_heads,
                               rotated ? num_heads : 0,
                               d};
    for_rows(rows.size(0), num_heads * d,
             [&](int64_t begin, int64_t end) { move_heads(a, begin, end); });
  });
}

void swiglu(const at::Tensor& gate_up, at::Tensor& y) {
  with_type_of(gate_up, [&]<class T>(T) {
    for_rows(y.size(0), 2 * y.size(1), [&](int64_t begin, int64_t end) {
      swiglu_rows(data<T>(gate_up), data<T>(y), y.size(1), begin, end);
    });
  });
}

void swiglu_backward(const at::Tensor& dy, const at::Tensor& gate_up, at::Tensor& dgate_up) {
  with_type_of(gate_up, [&]<class T>(T) {
    for_rows(dy.size(0), 2 * dy.size(1), [&](int64_t begin, int64_t end) {
      swiglu_backward_rows(data<T>(dy), data<T>(gate_up), data<T>(dgate_up), dy.size(1), begin,
                           end);
    });
  });
}

void softmax_statistics(const at::Tensor& logits, const at::Tensor& labels, int64_t begin_label,
                        at::Tensor& maximum, at::Tensor& sum, at::Tensor& target) {
  const auto v = logits.size(1);
  with_type_of(logits, [&]<class T>(T) {
    const T* values = data<T>(logits);
    const auto* label = labels.data_ptr<int64_t>();
    auto* out = target.data_ptr<float>();
    for_rows(logits.size(0), v, [&](int64_t begin, int64_t end) {
      statistics_rows(values, v, maximum.data_ptr<float>(), sum.data_ptr<float>(), begin, end);
      for (int64_t row = begin; row < end; ++row) {
        const auto column = label[row] - begin_label;
        out[row] = column >= 0 && column < v ? load(values, row * v + column) : 0.0F;
      }
    });
  });
}

void softmax_backward(at::Tensor& logits, const at::Tensor& labels, int64_t begin_label,
                      const at::Tensor& log_sum, float scale) {
  const auto v = logits.size(1);
  with_type_of(logits, [&]<class T>(T) {
    T* values = data<T>(logits);
    const auto* label = labels.data_ptr<int64_t>();
    const auto* shift = log_sum.data_ptr<float>();
    for_rows(logits.size(0), v, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const auto column = label[row] - begin_label;
        const bool mine = column >= 0 && column < v;
        const float at_label = mine ? load(values, row * v + column) : 0.0F;
        softmax_rows(values, v, shift, scale, row, row + 1);
        if (mine) store(values, row * v + column, scale * (std::exp(at_label - shift[row]) - 1.0F));
      }
    });
  });
}

void gather_rows(const at::Tensor& table, const at::Tensor& tokens, int64_t begin_row,
                 at::Tensor& y) {
  const auto* token = tokens.data_ptr<int64_t>();
  const auto row_bytes = y.size(1) * y.element_size();
  const auto* from = static_cast<const char*>(table.data_ptr());
  auto* to = static_cast<char*>(y.data_ptr());
  for_rows(y.size(0), y.size(1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto row = token[i] - begin_row;
      if (row >= 0 && row < table.size(0)) {
        std::memcpy(to + i * row_bytes, from + row * row_bytes, row_bytes);
      } else {
        std::memset(to + i * row_bytes, 0, row_bytes);
      }
    }
  });
}

void scatter_add_rows(const at::Tensor& dy, const at::Tensor& tokens, int64_t begin_row,
                      at::Tensor& table) {
  const auto* token = tokens.data_ptr<int64_t>();
  const auto h = dy.size(1);
  const auto run = [&](auto* to, const auto* from) {
    for (int64_t i = 0; i < dy.size(0);
         ++i) {  // rows may repeat: one thread, the same order in every run
      const auto row = token[i] - begin_row;
      if (row >= 0 && row < table.size(0)) add_row(to + row * h, from + i * h, h);
    }
  };
  with_type_of(dy, [&]<class T>(T) {
    table.scalar_type() == at::kFloat ? run(data<float>(table), data<T>(dy))
                                      : run(data<T>(table), data<T>(dy));
  });
}

}  // namespace braid::row_kernels
