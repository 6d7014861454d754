// Bit planes: the lowest bits of 256 bytes, all first bits before all second bits.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernel/dispatch.h"

namespace poseidon::kernel {

inline constexpr std::size_t kPlaneBytes = 256 / 8;

/// One plane as words, the first value's bit in the lowest bit of the first.
using PlaneWords = std::array<std::uint64_t, kPlaneBytes / sizeof(std::uint64_t)>;

/// Writes `plane_count` planes, the lowest bits' first, each of kPlaneBytes. Bits above are not looked at.
void pack_planes(Isa isa, const std::uint8_t* in, std::size_t plane_count, std::byte* out);

/// The opposite. Bits above `plane_count` become 0.
void unpack_planes(Isa isa, const std::byte* in, std::size_t plane_count, std::uint8_t* out);

/// Writes the bits of the planes that are set in the masks, one behind the other. Returns how many bytes it has
/// written, up to 7 more of which it may write; the last one is filled up with zeros.
std::size_t pack_chosen(Isa isa, std::span<const PlaneWords> planes, std::span<const PlaneWords> masks, std::byte* out);

/// The opposite: bits that are not set in the masks become 0. `in` has as many bytes as the masks' bits fill. There are
/// at most 32 planes.
void unpack_chosen(Isa isa, std::span<const std::byte> in, std::span<const PlaneWords> masks,
                   std::span<PlaneWords> planes);

}  // namespace poseidon::kernel
