// The kernels of level "baseline"; the loops themselves are in kernels_body.inc.

#include <cstddef>
#include <cstdint>

#include "forebay/kernels.h"

#define FOREBAY_LEVEL "baseline"
#define FOREBAY_F16C 0
#define FOREBAY_NARROWS 0

namespace forebay {

#include "kernels_body.inc"

}  // namespace forebay

namespace forebay {

const KernelTable& baseline_kernels() noexcept { return kTable; }

}  // namespace forebay
