// The kernels of level "avx512"; the loops themselves are in kernels_body.inc.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "forebay/kernels.h"

#define FOREBAY_LEVEL "avx512"
#define FOREBAY_F16C 1

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,prefer-vector-width=512")

namespace forebay {

#include "kernels_body.inc"

}  // namespace forebay

#pragma GCC pop_options

namespace forebay {

const KernelTable& avx512_kernels() noexcept { return kTable; }

}  // namespace forebay

#endif
