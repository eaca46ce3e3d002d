// Sum of squares in fp64 by a fixed tree, so that the result does not depend on threads, vector
// width or chunking. [Note: square-sum tree] The squares are cut into blocks of 4096, the last one
// padded with zeros; a block is halved (2048 sums x[i] + x[i + 2048], then 1024, ... 1); the block
// sums are a new list, treated the same way without squaring, until one value is left.
#pragma once

#include <cstddef>
#include <vector>

#include "forebay/kernels.h"
#include "forebay/types.h"

namespace forebay {

// Number of leaf blocks of a list.
constexpr std::size_t tree_blocks(std::size_t elements) noexcept {
    return (elements + kTreeBlock - 1) / kTreeBlock;
}

// Sums of the leaf blocks [first, last) of the squares of `elements` values at `source`.
void square_blocks(const KernelTable& table, DType dtype, ElementSpan source, std::size_t first,
                   std::size_t last, double* sums);

// The levels above the leaves: reduces a list of block sums to one value (0.0 when empty).
double sum_tree(const KernelTable& table, std::vector<double> sums);

}  // namespace forebay
