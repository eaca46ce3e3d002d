// The kernels of level "avx512"; the loops themselves are in kernels_body.inc.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "forebay/kernels.h"

#define FOREBAY_LEVEL "avx512"
#define FOREBAY_F16C 1
#define FOREBAY_LANES 16
// The forms without a mask begin from an undefined register, of which GCC 12 warns.
#define FOREBAY_SQRT(x) _mm512_maskz_sqrt_ps(0xffff, x)
#define FOREBAY_WIDEN(x) _mm512_maskz_cvtepu16_epi32(0xffff, x)
#define FOREBAY_PICK _mm512_permutex2var_epi16
#define FOREBAY_FUSES 1
#define FOREBAY_FMADD _mm512_fmadd_ps
#define FOREBAY_FNMADD _mm512_fnmadd_ps

#if defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
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

const KernelTable& avx512_kernels(Divider divider) noexcept {
    return divider == Divider::slow ? kSlowDividerTable : kTable;
}

}  // namespace forebay

#endif
