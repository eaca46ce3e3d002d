// The kernels of level "avx512"; the loops themselves are in kernels_body.inc.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "forebay/kernels.h"

#define FOREBAY_LEVEL "avx512"
#define FOREBAY_F16C 1
#define FOREBAY_NARROWS 1

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,prefer-vector-width=512")
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

const KernelTable& avx512_kernels() noexcept { return kTable; }

}  // namespace forebay

#endif
