#include "forebay/kernels.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace forebay {
namespace {

// Levels this processor (and its operating system) can run, best first.
std::vector<const KernelTable*> runnable_tables() {
    std::vector<const KernelTable*> tables;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("f16c") != 0;
    if (avx2 && __builtin_cpu_supports("fma") != 0 && __builtin_cpu_supports("avx512f") != 0 &&
        __builtin_cpu_supports("avx512bw") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
        __builtin_cpu_supports("avx512vl") != 0) {
        const bool intel = __builtin_cpu_is("intel") != 0;
        tables.push_back(&avx512_kernels(intel ? Divider::slow : Divider::quick));
    }
    if (avx2) {
        tables.push_back(&avx2_kernels());
    }
#endif
    tables.push_back(&baseline_kernels());
    return tables;
}

// Large enough to hide the call, small enough that the tile stays in the first-level cache.
constexpr std::size_t kConvertTile = 1024;

}  // namespace

const KernelTable& kernel_table(std::string_view forced) {
    const auto tables = runnable_tables();
    if (forced.empty()) {
        return *tables.front();
    }
    for (const KernelTable* table : tables) {
        if (table->level == forced) {
            return *table;
        }
    }
    throw std::invalid_argument("kernel level '" + std::string(forced) +
                                "' is not available; the best level here is '" +
                                std::string(tables.front()->level) +
                                "'\nhint: FOREBAY_KERNEL_LEVEL may be avx512, avx2 or baseline");
}

void load_as_float(const KernelTable& table, DType dtype, const void* source, float* destination,
                   std::size_t count) {
    switch (dtype) {
        case DType::float32:
            if (count > 0) {
                std::memcpy(destination, source, count * sizeof(float));
            }
            break;
        case DType::bfloat16:
            table.load_bfloat16(static_cast<const std::uint16_t*>(source), destination, count);
            break;
        case DType::float16:
            table.load_float16(static_cast<const std::uint16_t*>(source), destination, count);
            break;
    }
}

void store_from_float(const KernelTable& table, DType dtype, const float* source, void* destination,
                      std::size_t count) {
    switch (dtype) {
        case DType::float32:
            if (count > 0) {
                std::memcpy(destination, source, count * sizeof(float));
            }
            break;
        case DType::bfloat16:
            table.store_bfloat16(source, static_cast<std::uint16_t*>(destination), count);
            break;
        case DType::float16:
            table.store_float16(source, static_cast<std::uint16_t*>(destination), count);
            break;
    }
}

void convert(const KernelTable& table, DType destination_dtype, void* destination,
             DType source_dtype, const void* source, std::size_t count) {
    float tile[kConvertTile];
    const auto* from = static_cast<const std::byte*>(source);
    auto* to = static_cast<std::byte*>(destination);
    if (count > 0 && destination_dtype == source_dtype) {
        std::memcpy(to, from, count * item_bytes(source_dtype));
        return;
    }
    for (std::size_t start = 0; start < count; start += kConvertTile) {
        const std::size_t now = std::min(kConvertTile, count - start);
        load_as_float(table, source_dtype, from + start * item_bytes(source_dtype), tile, now);
        store_from_float(table, destination_dtype, tile, to + start * item_bytes(destination_dtype),
                         now);
    }
}

}  // namespace forebay
