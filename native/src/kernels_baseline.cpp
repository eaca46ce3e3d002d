// The kernels of level "baseline"; the loops themselves are in kernels_body.inc.

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <cstddef>
#include <cstdint>

#include "forebay/kernels.h"

#define FOREBAY_LEVEL "baseline"
#define FOREBAY_F16C 0
#define FOREBAY_FUSES 0
#if defined(__x86_64__)
#define FOREBAY_LANES 4
#define FOREBAY_SQRT _mm_sqrt_ps
#else
#define FOREBAY_LANES 0
#endif

namespace forebay {

#include "kernels_body.inc"

}  // namespace forebay

namespace forebay {

const KernelTable& baseline_kernels() noexcept { return kTable; }

}  // namespace forebay
