// The kernels of level "avx2"; the loops themselves are in kernels_body.inc.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "forebay/kernels.h"

#define FOREBAY_LEVEL "avx2"
#define FOREBAY_F16C 1
#define FOREBAY_LANES 8
#define FOREBAY_SQRT _mm256_sqrt_ps
#define FOREBAY_FUSES 0

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif

namespace forebay {

#include "kernels_body.inc"

}  // namespace forebay

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace forebay {

const KernelTable& avx2_kernels() noexcept { return kTable; }

}  // namespace forebay

#endif
