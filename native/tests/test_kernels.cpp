// Every level against scalar arithmetic written down once more, and against each other.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>

#include "check.h"
#include "fixtures.h"
#include "forebay/squares.h"

namespace forebay::test {
namespace {

const std::size_t kSizes[] = {0, 1, 7, 8, 15, 16, 17, 67, 199, 1023, 1024, 1025, 4095, 4097, 9001};

void adam_by_definition(const Hyper& h, float scale, TestPart& part) {
    for (std::size_t i = 0; i < part.grad.size(); ++i) {
        // volatile keeps the compiler from doing anything cleverer than one operation at a time.
        volatile float g = part.grad[i] * scale;
        volatile float p = part.master[i];
        volatile float t = 0;
        if (h.decay_mode == DecayMode::l2) {
            t = h.decay * p;
            g = g + t;
        } else if (h.decay_mode == DecayMode::decoupled) {
            p = p * h.decay;
        }
        volatile float m = part.exp_avg[i];
        t = g - m;
        t = h.one_minus_beta1 * t;
        m = m + t;
        volatile float v = h.beta2 * part.exp_avg_sq[i];
        t = h.one_minus_beta2 * g;
        t = t * g;
        v = v + t;
        t = std::sqrt(v);
        t = t / h.bias_correction2_sqrt;
        volatile float denominator = t + h.eps;
        t = h.step_size * m;
        t = t / denominator;
        p = p - t;
        part.master[i] = p;
        part.exp_avg[i] = m;
        part.exp_avg_sq[i] = v;
    }
}

TEST(adam_is_its_definition) {
    for (const KernelTable* table : all_levels()) {
        for (const DecayMode mode : {DecayMode::decoupled, DecayMode::l2, DecayMode::none}) {
            for (const std::size_t size : kSizes) {
                Hyper hyper = TestPart::hyper();
                hyper.decay_mode = mode;
                TestPart wanted(size);
                TestPart found(size);
                adam_by_definition(hyper, 0.5F, wanted);
                table->adam(hyper, 0.5F, found.grad.data(), found.master.data(),
                            found.exp_avg.data(), found.exp_avg_sq.data(), size);
                CHECK(same(found.master, wanted.master));
                CHECK(same(found.exp_avg, wanted.exp_avg));
                CHECK(same(found.exp_avg_sq, wanted.exp_avg_sq));
            }
        }
    }
}

// The odd x whose product with `odd` is 1 modulo 2^32.
std::uint32_t inverse_of(std::uint32_t odd) {
    std::uint32_t inverse = odd;
    for (int i = 0; i < 5; ++i) {
        inverse *= 2U - odd * inverse;  // each round doubles the bits that are right
    }
    return inverse;
}

// Square roots whose quotient by `divisor` lies as near to the middle between two numbers as any:
// with the divisor's 24 bits B, X = (N * B + r) / 2^s for an odd N of 25 bits and a small r.
std::vector<float> hard_roots(float divisor) {
    int exponent = 0;
    const auto bits = static_cast<std::uint32_t>(std::ldexp(std::frexp(divisor, &exponent), 24));
    std::vector<float> roots;
    if (bits % 2 == 0) {
        return roots;
    }
    for (const int s : {24, 25}) {
        const std::uint64_t modulus = std::uint64_t{1} << s;
        for (const std::int64_t r : {-5, -3, -1, 1, 3, 5}) {
            const auto wanted = static_cast<std::uint64_t>(-r) * inverse_of(bits);
            for (std::uint64_t n = wanted % modulus; n < (1U << 25); n += modulus) {
                const std::uint64_t x = (n * bits + static_cast<std::uint64_t>(r)) >> s;
                if (n >= (1U << 24) && x >= (1U << 23) && x < (1U << 24)) {
                    roots.push_back(std::ldexp(static_cast<float>(x), -30));
                }
            }
        }
    }
    return roots;
}

// What a level does instead of dividing by the bias correction must give the division's bits: for
// v of any size, and for roots that are the hardest to divide.
TEST(every_division_by_the_bias_correction_has_its_bits) {
    constexpr std::size_t count = 4096;
    std::mt19937 random(11);
    std::uniform_real_distribution<float> one_to_two(1.0F, 2.0F);
    std::vector<float> divisors = {1.0F, 0.5F, 0.99999994F, 0.50000006F, 1e-12F, 1e12F};
    for (int step = 1; step < 3000; step += step / 2 + 1) {
        for (const double beta2 : {0.95, 0.99, 0.999, 0.9999}) {
            divisors.push_back(static_cast<float>(std::sqrt(1.0 - std::pow(beta2, step))));
        }
    }
    for (int i = 0; i < 1000; ++i) {
        divisors.push_back(one_to_two(random) / 2);
    }
    Hyper hyper = TestPart::hyper();
    hyper.decay_mode = DecayMode::none;
    hyper.beta2 = 1.0F;  // m and v stay as they are, and the weight becomes -m / quotient
    hyper.one_minus_beta1 = 0.0F;
    hyper.one_minus_beta2 = 0.0F;
    hyper.eps = 0.0F;
    hyper.step_size = 1.0F;
    const std::vector<float> gradient(count, 0.0F);
    std::vector<float> average(count);
    std::vector<float> average_sq(count);
    std::size_t hard_ones = 0;
    for (const float divisor : divisors) {
        const std::vector<float> hard = hard_roots(divisor);
        hard_ones += hard.size();
        hyper.bias_correction2_sqrt = divisor;
        for (std::size_t i = 0; i < count; ++i) {
            // Some quotients give the same weight as their neighbour does, but not for every m.
            average[i] = one_to_two(random);
            const auto bits = static_cast<std::uint32_t>(random()) % 0x7f800001U;
            std::memcpy(&average_sq[i], &bits, sizeof bits);
            if (!hard.empty() && i % 2 == 0) {
                const float root = hard[i / 2 % hard.size()];
                average_sq[i] = root * root;  // the square root of which is the root again
            }
        }
        average_sq[1] = std::numeric_limits<float>::infinity();
        average_sq[3] = 0.0F;
        std::vector<float> first;
        for (const KernelTable* table : all_levels()) {
            std::vector<float> weight(count, 0.0F);
            std::vector<float> m = average;
            std::vector<float> v = average_sq;
            table->adam(hyper, 1.0F, gradient.data(), weight.data(), m.data(), v.data(), count);
            CHECK(first.empty() || same(weight, first));
            first = weight;
        }
    }
    CHECK(hard_ones > 1000);
}

TEST(conversions_agree_between_levels) {
    const std::vector<float> values = random_values(100'003, 5);
    const KernelTable& first = kernel_table("baseline");
    for (const KernelTable* table : all_levels()) {
        for (const DType dtype : {DType::bfloat16, DType::float16}) {
            std::vector<std::uint16_t> wanted(values.size());
            std::vector<std::uint16_t> found(values.size());
            store_from_float(first, dtype, values.data(), wanted.data(), values.size());
            store_from_float(*table, dtype, values.data(), found.data(), values.size());
            CHECK(wanted == found);
            std::vector<float> wide_wanted(values.size());
            std::vector<float> wide_found(values.size());
            load_as_float(first, dtype, wanted.data(), wide_wanted.data(), values.size());
            load_as_float(*table, dtype, found.data(), wide_found.data(), values.size());
            CHECK(same(wide_wanted, wide_found));
        }
    }
}

TEST(split_and_join_lose_nothing) {
    const std::vector<float> values = random_values(10'001, 6);
    for (const KernelTable* table : all_levels()) {
        std::vector<std::uint16_t> high(values.size());
        std::vector<std::uint16_t> low(values.size());
        std::vector<std::uint16_t> weight(values.size());
        std::vector<float> back(values.size());
        table->split(values.data(), high.data(), low.data(), values.size());
        table->join(high.data(), low.data(), back.data(), values.size());
        table->store_bfloat16(values.data(), weight.data(), values.size());
        CHECK(same(back, values));
        CHECK(weight == high);
    }
}

double tree_by_definition(std::vector<double> level) {
    while (true) {
        std::vector<double> above;
        for (std::size_t start = 0; start < level.size(); start += kTreeBlock) {
            std::vector<double> block(kTreeBlock, 0.0);
            for (std::size_t i = start; i < level.size() && i < start + kTreeBlock; ++i) {
                block[i - start] = level[i];
            }
            for (std::size_t half = kTreeBlock / 2; half > 0; half /= 2) {
                for (std::size_t i = 0; i < half; ++i) {
                    block[i] += block[i + half];
                }
            }
            above.push_back(block[0]);
        }
        if (above.size() <= 1) {
            return above.empty() ? 0.0 : above[0];
        }
        level = above;
    }
}

TEST(the_square_tree_is_its_definition) {
    for (const std::size_t size : kSizes) {
        std::vector<float> values(size);
        std::vector<double> squares;
        std::mt19937 random(9);
        std::normal_distribution<float> normal;
        for (float& value : values) {
            value = normal(random);
            squares.push_back(static_cast<double>(value) * static_cast<double>(value));
        }
        const double wanted = tree_by_definition(squares);
        for (const KernelTable* table : all_levels()) {
            std::vector<double> sums(tree_blocks(size));
            square_blocks(*table, DType::float32, {address_of(values.data()), size}, 0, sums.size(),
                          sums.data());
            CHECK(sum_tree(*table, sums) == wanted);
        }
    }
}

TEST(unknown_levels_are_refused) {
    bool refused = false;
    try {
        kernel_table("sse9");
    } catch (const std::invalid_argument&) {
        refused = true;
    }
    CHECK(refused);
}

}  // namespace
}  // namespace forebay::test
