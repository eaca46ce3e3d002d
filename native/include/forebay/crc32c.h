// CRC-32C (Castagnoli): the checksum of blocks on disk. It finds damage, not intent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace forebay {

// The checksum of `count` bytes that follow bytes of the checksum `seed` (0: none). Level
// "baseline" computes by tables, the others by the processor's own instruction where it has one;
// the value is the same.
std::uint32_t crc32c(std::string_view level, const void* data, std::size_t count,
                     std::uint32_t seed) noexcept;

// "WHAT is not what was written: its CRC-32C is NOW, and was THEN".
std::string different_text(const std::string& what, std::uint32_t now, std::uint32_t then);

}  // namespace forebay
