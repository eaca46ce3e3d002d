// The arithmetic, as a table of functions per instruction set. Every level gives the same bits:
// each operation is a separately rounded IEEE operation, and no level contracts or reorders any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "forebay/types.h"

namespace forebay {

// Elements of one leaf of the square-sum tree; see `square_sum` in squares.h.
inline constexpr std::size_t kTreeBlock = 4096;

struct KernelTable {
    std::string_view level;
    // To and from fp32. Narrowing: fp16 rounds to nearest even; bf16 rounds half away from zero.
    void (*load_bfloat16)(const std::uint16_t* source, float* destination, std::size_t count);
    void (*load_float16)(const std::uint16_t* source, float* destination, std::size_t count);
    void (*store_bfloat16)(const float* source, std::uint16_t* destination, std::size_t count);
    void (*store_float16)(const float* source, std::uint16_t* destination, std::size_t count);
    // fp32 <-> bf16 weight plus the low 16 bits, lossless.
    void (*join)(const std::uint16_t* high, const std::uint16_t* low, float* whole,
                 std::size_t count);
    void (*split)(const float* whole, std::uint16_t* high, std::uint16_t* low, std::size_t count);
    // One Adam step over p, m, v in place; g is multiplied by scale first.
    void (*adam)(const Hyper& hyper, float scale, const float* g, float* p, float* m, float* v,
                 std::size_t count);
    // The same over a split master, with a bf16 gradient; null where apart is faster.
    void (*adam_split)(const Hyper& hyper, float scale, const std::uint16_t* g, std::uint16_t* high,
                       std::uint16_t* low, float* m, float* v, std::size_t count);
    void (*add)(const float* source, float* accumulator, std::size_t count);
    // One block of kTreeBlock values, halved until one is left; `square_block` squares first, and
    // meanwhile has `ahead_bytes` of `ahead` brought into the cache.
    double (*square_block)(const float* values, const void* ahead, std::size_t ahead_bytes);
    double (*sum_block)(const double* values);
};

// The best table of this processor, or the one named by `forced` ("" : best). Throws
// std::invalid_argument when the name is unknown or this processor cannot run that level.
const KernelTable& kernel_table(std::string_view forced);

// One entry per level; compiled from the same source.
const KernelTable& baseline_kernels() noexcept;
#if defined(__x86_64__)
const KernelTable& avx2_kernels() noexcept;
// Sixteen divisions take a core 16 cycles (slow) or half of that, while it makes 32 products a
// cycle. Either table gives the same bits.
enum class Divider { quick, slow };
const KernelTable& avx512_kernels(Divider divider) noexcept;
#endif

// Table entry by element type; float32 copies.
void load_as_float(const KernelTable& table, DType dtype, const void* source, float* destination,
                   std::size_t count);
void store_from_float(const KernelTable& table, DType dtype, const float* source, void* destination,
                      std::size_t count);

// Source and destination may have any two element types and must not overlap.
void convert(const KernelTable& table, DType destination_dtype, void* destination,
             DType source_dtype, const void* source, std::size_t count);

}  // namespace forebay
