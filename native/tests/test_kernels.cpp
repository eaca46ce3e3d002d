// Every level against scalar arithmetic written down once more, and against each other.
#include <cmath>
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
