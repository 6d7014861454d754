// Lossless coding of numbers: fewer bytes for the same bits.
//
// Gradients of one layer have similar magnitudes, so the exponents of neighbours differ little, while signs and
// mantissas look random. Blocks of kBlockValues values are coded each by itself: signs and mantissas as they are, and
// each exponent as its distance below the block's largest one, in as few bits as most of the block needs. Every bit
// pattern comes back as it was. Pure functions, as in kernel.h; the coded bytes do not depend on the CPU.
//
// A block begins with one of these bytes (docs/wire-format.md has the rest):
//   0x00 n    n + 1 blocks of zeros
//   0x01      one block of zeros
//   0x02      the values as they are
//   0x20 + w  coded in w bits; 0x28 + w as well, with a code for zeros
// What is left over after the last full block follows as it is.
#pragma once

#include <cstddef>
#include <span>

#include "base/coding.h"
#include "kernel/dispatch.h"

namespace poseidon::kernel {

inline constexpr std::size_t kBlockValues = 256;

/// How many bytes `value_count` values take at most.
constexpr std::size_t most_coded_bytes(Coding coding, std::size_t value_count) {
  return value_count * value_bytes(coding) + value_count / kBlockValues;
}

/// Codes `value_count` values; `coding` is not Coding::none. `out` has room for most_coded_bytes, and does
/// not overlap. Returns how many it got. The bytes do not depend on `isa`, which this CPU must have.
std::size_t encode_lossless(Coding coding, const std::byte* values, std::size_t value_count, std::byte* out,
                            Isa isa = best_isa());

/// How far decode_lossless came.
struct Decoded {
  std::size_t coded_bytes = 0;
  std::size_t value_count = 0;
  bool malformed = false;  // what follows stands for no values, or for more than are wanted
};

/// Decodes from the front of `coded` what is there whole, at most `value_count` values, to `values`. More may follow:
/// call it again with the bytes that were not used and what came after them. Reads and writes nothing else, whatever
/// the bytes are. `value_count` is what is left of the array, its last values included.
Decoded decode_lossless(Coding coding, std::span<const std::byte> coded, std::byte* values, std::size_t value_count,
                        Isa isa = best_isa());

/// out[i] = a number that is small where value[i] is near base[i]: the difference of the two as integers, its sign in
/// the lowest bit. `width` is 4 or 2 bytes. `out` may be either of the others.
void difference(const std::byte* values, const std::byte* base, std::byte* out, std::size_t value_count,
                std::size_t width);

/// The opposite: values[i] = base[i] + difference[i]. `values` may be either of the others.
void add_difference(const std::byte* differences, const std::byte* base, std::byte* values, std::size_t value_count,
                    std::size_t width);

}  // namespace poseidon::kernel
