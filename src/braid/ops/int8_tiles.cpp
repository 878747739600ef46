// Products of tiles with int8 weights, for the instruction set that this file is compiled for (CPU_CAPABILITY).
//
// A tile is a few rows of x times a few vectors of outputs. Its sums stay in registers over a segment; values are
// converted on the way, which costs ports that multiply-adds leave free.
#include <ATen/cpu/vec/vec.h>

#include "braid/ops/int8_kernel.h"

namespace braid::int8::CPU_CAPABILITY {
namespace {

using std::int64_t;
using std::int8_t;
using Vec = at::vec::Vectorized<float>;

constexpr int64_t kVec = Vec::size();
constexpr int64_t kPanelVecs = kPanel / kVec;

#if defined(CPU_CAPABILITY_AVX512) || defined(__aarch64__)
constexpr int kRegisters = 28;  // of sums and values; a few are left for x and conversions
#elif defined(CPU_CAPABILITY_AVX2)
constexpr int kRegisters = 14;
#else
constexpr int kRegisters = 8;  // pairs of SSE's
#endif
constexpr int kMinVecs = 2;

/// Rows of a tile of so many vectors: its sums and one column's values fit the registers.
constexpr int max_rows(int vecs) { return kRegisters / vecs - 1; }

// Bytes of x that stay in the cache while a tile's values pass by.
constexpr int64_t kCachedBytes = 512 << 10;

inline Vec to_float(const int8_t* values) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values))));
#elif defined(CPU_CAPABILITY_AVX2)
  return _mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(values))));
#else
  float floats[kVec];
  for (int64_t i = 0; i < kVec; ++i) floats[i] = values[i];
  return Vec::loadu(floats);
#endif
}

struct F32 {
  using X = float;
  using Weight = Vec;
  static constexpr int64_t kDepth = 1;  // columns at once
  static Weight weight(const int8_t* values) { return to_float(values); }
  static Weight broadcast(const X* x) { return Vec(*x); }
  static Vec add_product(Vec sum, Weight x, Weight weight) {
    return at::vec::fmadd(x, weight, sum);
  }
};

#if defined(__AVX512BF16__)
// The instruction takes subnormals for 0.
struct Bf16 {
  using X = std::int32_t;  // a pair
  using Weight = __m512i;
  static constexpr int64_t kDepth = 2;
  static Weight weight(const int8_t* values) {
    // Small integers are exact in bf16, the upper half of an f32.
    const __m512i first = _mm512_castps_si512(to_float(values));
    const __m512i second = _mm512_castps_si512(to_float(values + kPanel));
    return _mm512_or_si512(_mm512_srli_epi32(first, 16), second);
  }
  static Weight broadcast(const X* x) { return _mm512_set1_epi32(*x); }
  static Vec add_product(Vec sum, Weight x, Weight weight) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(weight));
  }
};
#endif

/// Rows of one block times vectors of outputs, over some segments.
struct Place {
  const Product* p;
  int64_t vec, first_row, begin_segment, end_segment;
};

template <class T, int kRows, int kVecs>
void multiply_tile(const Place& place) {
  const Product& p = *place.p;
  const auto* x = static_cast<const typename T::X*>(p.x) + place.first_row * p.k_even / T::kDepth;
  const int64_t panel_values = p.k_even * kPanel;
  const int8_t* values =
      p.values + place.vec / kPanelVecs * panel_values + place.vec % kPanelVecs * kVec;
  for (int64_t s = place.begin_segment; s < place.end_segment; ++s) {
    const Segment& segment = p.segments[s];
    Vec sums[kRows][kVecs];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) sums[r][v] = Vec(0.0F);
    }
    const int8_t* column = values + segment.begin * kPanel;
    const auto* x_column = x + segment.begin / T::kDepth * kRows;
    for (int64_t c = segment.begin; c < segment.end; c += T::kDepth) {
      typename T::Weight weights[kVecs];
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v)
        weights[v] = T::weight(column + v / kPanelVecs * panel_values + v % kPanelVecs * kVec);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const typename T::Weight broadcast = T::broadcast(x_column + r);
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v)
          sums[r][v] = T::add_product(sums[r][v], broadcast, weights[v]);
      }
      column += T::kDepth * kPanel;
      x_column += kRows;
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      const int64_t output = (place.vec + v) * kVec;
      const int64_t parameters = segment.group * p.num_panels * kPanel + output;
      const Vec scale = Vec::loadu(p.scales + parameters);
      float* total =
          p.total + (output / kPanel * p.rows + place.first_row) * kPanel + output % kPanel;
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        Vec sum = sums[r][v];
        if (p.zero_points != nullptr) {
          const Vec x_sum(p.x_sums[s * p.rows + place.first_row + r]);
          sum = sum - Vec::loadu(p.zero_points + parameters) * x_sum;
        }
        at::vec::fmadd(scale, sum, Vec::loadu(total + r * kPanel)).store(total + r * kPanel);
      }
    }
  }
}

template <class T, int kVecs, int kRows = max_rows(kVecs)>
void multiply_rows(const Place& place, int64_t rows) {
  if (rows == kRows)
    multiply_tile<T, kRows, kVecs>(place);
  else if constexpr (kRows > 1)
    multiply_rows<T, kVecs, kRows - 1>(place, rows);
}

/// All vectors of outputs from place.vec to end_vec, kVecs at once while there are as many and the
/// blocks have few enough rows for it.
template <class T, int kVecs>
void multiply_blocks(Place& place, int64_t end_vec) {
  const Product& p = *place.p;
  if constexpr (max_rows(kVecs) > 0) {
    if ((p.rows + p.num_blocks - 1) / p.num_blocks > max_rows(kVecs)) return;
    for (; place.vec + kVecs <= end_vec; place.vec += kVecs) {
      for (int64_t block = 0; block < p.num_blocks; ++block) {
        place.first_row = block_begin(p, block);
        multiply_rows<T, kVecs>(place, block_begin(p, block + 1) - place.first_row);
      }
    }
  }
}

template <class T>
void multiply_panels(const Product& p, int64_t begin_panel, int64_t end_panel) {
  const int64_t end_vec = end_panel * kPanelVecs;
  const int64_t cached = kCachedBytes * T::kDepth / (p.rows * int64_t{sizeof(typename T::X)});
  for (int64_t begin = 0, end = 0; begin < p.num_segments; begin = end) {
    while (end < p.num_segments &&
           (end == begin || p.segments[end].end - p.segments[begin].begin <= cached))
      ++end;
    Place place{&p, begin_panel * kPanelVecs, 0, begin, end};
    // With few rows several panels at once hide the latencies of sums and of memory.
    multiply_blocks<T, 8>(place, end_vec);
    multiply_blocks<T, 4>(place, end_vec);
    multiply_blocks<T, kMinVecs>(place, end_vec);
  }
}

}  // namespace

#define BRAID_STRING_OF(x) #x
#define BRAID_STRING(x) BRAID_STRING_OF(x)
extern const Kernel kernel;
constinit const Kernel kernel {
  BRAID_STRING(CPU_CAPABILITY), max_rows(kMinVecs), multiply_panels<F32>,
#if defined(__AVX512BF16__)
      multiply_panels<Bf16>
#else
      nullptr
#endif
};

}  // namespace braid::int8::CPU_CAPABILITY
