// Random numbers and a part whose arrays are owned here, for the tests.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "forebay/kernels.h"
#include "forebay/types.h"
#include "forebay/update.h"

namespace forebay::test {

inline std::vector<const KernelTable*> all_levels() {
    std::vector<const KernelTable*> tables;
    for (const char* level : {"baseline", "avx2", "avx512"}) {
        try {
            tables.push_back(&kernel_table(level));
        } catch (const std::invalid_argument&) {
            // This processor cannot run that level.
        }
    }
#if defined(__x86_64__)
    if (tables.back()->level == "avx512") {
        // The choice between these is the processor's make.
        tables.back() = &avx512_kernels(Divider::quick);
        tables.push_back(&avx512_kernels(Divider::slow));
    }
#endif
    return tables;
}

inline Address address_of(const void* pointer) { return reinterpret_cast<Address>(pointer); }

// Values of every magnitude, with a share of special ones.
inline std::vector<float> random_values(std::size_t count, unsigned seed) {
    const float special[] = {0.0F,
                             -0.0F,
                             std::numeric_limits<float>::denorm_min(),
                             -1e-40F,
                             std::numeric_limits<float>::max(),
                             std::numeric_limits<float>::infinity(),
                             -std::numeric_limits<float>::infinity(),
                             65520.0F,
                             5.96e-8F};
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (float& value : values) {
        value = random() % 8 == 0
                    ? special[random() % 9]
                    : std::ldexp(normal(random), static_cast<int>(random() % 60) - 40);
    }
    return values;
}

// Equal bits, or both NaN.
inline bool same(float a, float b) {
    return (std::isnan(a) && std::isnan(b)) || std::memcmp(&a, &b, sizeof(a)) == 0;
}

inline bool same(const std::vector<float>& a, const std::vector<float>& b) {
    if (a.size() != b.size()) {
        return false;
    }
    for (std::size_t i = 0; i < a.size(); ++i) {
        if (!same(a[i], b[i])) {
            return false;
        }
    }
    return true;
}

struct TestPart {
    explicit TestPart(std::size_t elements, unsigned seed = 1)
        : grad(random_values(elements, seed)),
          master(random_values(elements, seed + 1)),
          exp_avg(random_values(elements, seed + 2)),
          exp_avg_sq(random_values(elements, seed + 3)) {
        for (float& value : exp_avg_sq) {
            value = std::fabs(value);
        }
    }

    PartState state() {
        PartState part;
        part.grad = address_of(grad.data());
        part.master = address_of(master.data());
        part.exp_avg = address_of(exp_avg.data());
        part.exp_avg_sq = address_of(exp_avg_sq.data());
        part.segments = {{0, grad.size()}};
        part.elements = grad.size();
        return part;
    }

    static Hyper hyper() {
        return {DecayMode::decoupled, 0.9999F, 0.1F, 0.999F, 0.001F, 1e-8F, 0.03F, 1e-3F};
    }

    static UpdateRequest request(std::size_t piece_elements) {
        return {{hyper()}, {0}, 0.5F, piece_elements, {}, 0, {}, {}};
    }

    std::vector<float> grad;
    std::vector<float> master;
    std::vector<float> exp_avg;
    std::vector<float> exp_avg_sq;
};

}  // namespace forebay::test
