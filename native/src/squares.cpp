#include "forebay/squares.h"

#include <algorithm>
#include <utility>

namespace forebay {

void square_blocks(const KernelTable& table, DType dtype, ElementSpan source, std::size_t first,
                   std::size_t last, double* sums) {
    alignas(64) float padded[kTreeBlock];
    const std::size_t item = item_bytes(dtype);
    for (std::size_t block = first; block < last; ++block) {
        const std::size_t start = block * kTreeBlock;
        const std::size_t count = std::min(kTreeBlock, source.elements - start);
        const Address address = source.address + start * item;
        const auto* values = reinterpret_cast<const void*>(address);
        // Prefetchers of the processor stop at pages; a block is two or four of them.
        const std::size_t ahead = block + 1 < last ? kTreeBlock * item : 0;
        const auto* next = reinterpret_cast<const void*>(address + ahead);
        if (dtype == DType::float32 && count == kTreeBlock) {
            *sums++ = table.square_block(static_cast<const float*>(values), next, ahead);
            continue;
        }
        load_as_float(table, dtype, values, padded, count);
        std::fill(padded + count, padded + kTreeBlock, 0.0F);
        *sums++ = table.square_block(padded, next, ahead);
    }
}

double sum_tree(const KernelTable& table, std::vector<double> sums) {
    if (sums.empty()) {
        return 0.0;
    }
    while (sums.size() > 1) {
        const std::size_t blocks = tree_blocks(sums.size());
        sums.resize(blocks * kTreeBlock, 0.0);
        std::vector<double> above(blocks);
        for (std::size_t block = 0; block < blocks; ++block) {
            above[block] = table.sum_block(sums.data() + block * kTreeBlock);
        }
        sums = std::move(above);
    }
    return sums.front();
}

}  // namespace forebay
