// CRC-32C (Castagnoli). It detects torn and damaged data. It does not protect from attackers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace poseidon {

/// The checksum of `data`, or of earlier data with the checksum `before` followed by `data`. It runs at several GB/s if
/// the CPU has the instruction.
std::uint32_t crc32c(std::span<const std::byte> data, std::uint32_t before = 0);

/// The same, computed from tables as on a CPU without the instruction.
std::uint32_t crc32c_by_table(std::span<const std::byte> data, std::uint32_t before = 0);

}  // namespace poseidon
