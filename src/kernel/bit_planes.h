// Bit planes: the lowest bits of 256 bytes, all first bits before all second bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernel/dispatch.h"

namespace poseidon::kernel {

inline constexpr std::size_t kPlaneBytes = 256 / 8;

/// Writes `plane_count` planes, the lowest bits' first, each of kPlaneBytes. Bits above are not looked at.
void pack_planes(Isa isa, const std::uint8_t* in, std::size_t plane_count, std::byte* out);

/// The opposite. Bits above `plane_count` become 0.
void unpack_planes(Isa isa, const std::byte* in, std::size_t plane_count, std::uint8_t* out);

}  // namespace poseidon::kernel
