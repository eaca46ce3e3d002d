// The checksum against published values, and its two ways of computing against each other.
#include <cstdint>
#include <cstring>
#include <vector>

#include "check.h"
#include "forebay/crc32c.h"

namespace forebay::test {
namespace {

std::vector<unsigned char> noise(std::size_t count) {
    std::vector<unsigned char> bytes(count);
    std::uint32_t state = 1;
    for (unsigned char& byte : bytes) {
        state = state * 1664525U + 1013904223U;
        byte = static_cast<unsigned char>(state >> 24);
    }
    return bytes;
}

// RFC 3720 (iSCSI), appendix B.4, and the check value of the catalogue of CRCs.
TEST(crc32c_has_the_published_values) {
    const std::vector<unsigned char> zeros(32, 0);
    const std::vector<unsigned char> ones(32, 0xFF);
    std::vector<unsigned char> rising(32);
    for (std::size_t i = 0; i < rising.size(); ++i) {
        rising[i] = static_cast<unsigned char>(i);
    }
    for (const char* level : {"baseline", "avx2"}) {
        CHECK(crc32c(level, nullptr, 0, 0) == 0);
        CHECK(crc32c(level, "123456789", 9, 0) == 0xE3069283U);
        CHECK(crc32c(level, zeros.data(), 32, 0) == 0x8A9136AAU);
        CHECK(crc32c(level, ones.data(), 32, 0) == 0x62A8AB43U);
        CHECK(crc32c(level, rising.data(), 32, 0) == 0x46DD794EU);
    }
}

TEST(crc32c_is_the_same_by_tables_and_by_instruction) {
    const auto bytes = noise(40000);
    for (const std::size_t count :
         {0, 1, 7, 8, 9, 767, 768, 769, 1535, 1536, 4096, 12287, 12288, 12289, 13057, 39990}) {
        for (const std::size_t begin : {0, 1, 5}) {
            const unsigned char* at = bytes.data() + begin;
            CHECK(crc32c("baseline", at, count, 0) == crc32c("avx2", at, count, 0));
            CHECK(crc32c("baseline", at, count, 0xABCDEF01U) ==
                  crc32c("avx2", at, count, 0xABCDEF01U));
        }
    }
}

TEST(crc32c_goes_on_from_a_seed) {
    const auto bytes = noise(30000);
    for (const char* level : {"baseline", "avx2"}) {
        const std::uint32_t whole = crc32c(level, bytes.data(), bytes.size(), 0);
        for (const std::size_t cut : {1U, 8U, 777U, 12288U, 29999U}) {
            const std::uint32_t head = crc32c(level, bytes.data(), cut, 0);
            CHECK(crc32c(level, bytes.data() + cut, bytes.size() - cut, head) == whole);
        }
    }
}

}  // namespace
}  // namespace forebay::test
