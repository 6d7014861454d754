// CRC-32C (Castagnoli): tells torn and damaged data from whole. Not a defence against people.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace poseidon {

/// Of `data`, or of what came before, whose checksum is `before`, followed by `data`. Several GB/s where the CPU has
/// the instruction.
std::uint32_t crc32c(std::span<const std::byte> data, std::uint32_t before = 0);

/// The same from tables alone, as on a CPU without the instruction.
std::uint32_t crc32c_by_table(std::span<const std::byte> data, std::uint32_t before = 0);

}  // namespace poseidon
