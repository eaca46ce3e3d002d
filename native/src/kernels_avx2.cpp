// The kernels of level "avx2"; the loops themselves are in kernels_body.inc.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "forebay/kernels.h"

#define FOREBAY_LEVEL "avx2"
#define FOREBAY_F16C 1

#pragma GCC push_options
#pragma GCC target("avx2,f16c")

namespace forebay {

#include "kernels_body.inc"

}  // namespace forebay

#pragma GCC pop_options

namespace forebay {

const KernelTable& avx2_kernels() noexcept { return kTable; }

}  // namespace forebay

#endif
