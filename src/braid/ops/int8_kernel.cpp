// Which instruction sets this CPU has.
#include "braid/ops/int8_kernel.h"

namespace braid::int8 {

namespace DEFAULT {
extern const Kernel kernel;
}
#if defined(__x86_64__)
namespace AVX2 {
extern const Kernel kernel;
}
namespace AVX512 {
extern const Kernel kernel;
}
namespace AVX512_BF16 {
extern const Kernel kernel;
}
#endif

const std::vector<Kernel>& kernels() {
  static const std::vector<Kernel> supported = [] {
    std::vector<Kernel> result{DEFAULT::kernel};
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
      result.push_back(AVX2::kernel);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      result.push_back(AVX512::kernel);
      if (__builtin_cpu_supports("avx512bf16")) result.push_back(AVX512_BF16::kernel);
    }
#endif
    return result;
  }();
  return supported;
}

}  // namespace braid::int8
