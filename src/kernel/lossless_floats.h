// Blocks of floating-point values: signs and mantissas as they are, exponents as distances below the largest one.
//
//   0x20 + w | largest exponent | number of escapes | low bytes | signs and mantissas | w planes of distances | escapes
//
// 0x28 + w: the distances are one larger, and 0 stands for an exponent of 0. So zeros among other values, as behind a
// rectifier, are no escapes. A distance that does not fit in w bits is coded as the largest number that does, and comes
// among the escapes, a byte each. Float32 has 16 low bits of each value, then a byte each with the sign and 7 bits.
// Bfloat16 has such a byte. Float16 has 8 bits of each mantissa, then planes of the 2 bits above and of the sign.
#pragma once

#include <cstring>

#include "kernel/lossless_block.h"

namespace poseidon::kernel {

template <typename Word, unsigned exponent_bits, unsigned mantissa_bits>
class FloatBlock {
 public:
  using Value = Word;
  static constexpr std::size_t kHeadBytes = 3;

  /// The head of a coded block. `at` has kHeadBytes.
  struct Head {
    explicit Head(const std::byte* at)
        : bits((byte_at(at) - unsigned{kCodedBlock}) & ~kZeroCode),
          has_zero_code((byte_at(at) & kZeroCode) != 0),
          top(byte_at(at + 1)),
          escape_count(byte_at(at + 2)) {}
    bool valid() const { return bits <= kMostBits && (bits > 0 || (escape_count == 0 && !has_zero_code)); }
    std::size_t block_bytes() const { return kHeadBytes + kRawBytes + bits * kPlaneBytes + escape_count; }
    unsigned bits;
    bool has_zero_code;
    std::uint8_t top;
    std::size_t escape_count;
  };

  /// Codes a block to `out`, which has room for the values as they are. Returns its bytes; 0 if it would not shrink or
  /// if all values are zeros, which `zeros` says.
  static POSEIDON_INLINE std::size_t encode(Isa isa, const std::byte* values, std::byte* out, bool& zeros) {
    BlockBytes exponents;
    // What is written before it is known that the block shrinks has fewer bytes than the values.
    zeros = split(isa, values, out + kHeadBytes, exponents) == 0;
    if (zeros) return 0;
    const std::uint8_t top = largest(exponents);
    BlockBytes distances;
    for (std::size_t i = 0; i < kBlockValues; ++i) distances[i] = static_cast<std::uint8_t>(top - exponents[i]);
    Width width = best_width(distances);
    const bool has_zero_code = width.escape_count > 0 && take_zero_code(exponents, top, distances, width);
    const std::size_t block_bytes = kHeadBytes + kRawBytes + width.bytes();
    if (block_bytes >= kBlockValues * sizeof(Word)) return 0;
    out[0] = static_cast<std::byte>(kCodedBlock + width.bits + (has_zero_code ? kZeroCode : 0));
    out[1] = static_cast<std::byte>(top);
    out[2] = static_cast<std::byte>(width.escape_count);
    std::byte* const planes = out + kHeadBytes + kRawBytes;
    if (width.escape_count > 0) take_escapes(distances, width.bits, planes + width.bits * kPlaneBytes);
    pack_planes(isa, distances.data(), width.bits, planes);
    return block_bytes;
  }

  /// Decodes a block of which all bytes are there. Returns false if no block can be coded like this.
  static POSEIDON_INLINE bool decode(Isa isa, const std::byte* coded, const Head& head, std::byte* values) {
    const std::byte* const planes = coded + kHeadBytes + kRawBytes;
    BlockBytes distances;
    unpack_planes(isa, planes, head.bits, distances.data());
    if (head.bits > 0 && !put_escapes(planes + head.bits * kPlaneBytes, head, distances)) return false;
    if (head.has_zero_code) {
      for (std::uint8_t& distance : distances)
        distance = static_cast<std::uint8_t>(distance == 0 ? 0 : (head.top + 1 - distance) & kExponentMask);
    } else {
      for (std::uint8_t& distance : distances)
        distance = static_cast<std::uint8_t>((head.top - distance) & kExponentMask);
    }
    join(isa, coded + kHeadBytes, distances, values);
    return true;
  }

 private:
  static constexpr unsigned kLowBits = mantissa_bits > 16 ? 16 : 0;
  static constexpr unsigned kMantissaBits = mantissa_bits - kLowBits;  // of a word of 16 bits
  static constexpr std::size_t kExtraPlanes = kMantissaBits + 1 - 8;   // for what a byte does not hold
  static constexpr std::size_t kLowBytes = kBlockValues * kLowBits / 8;
  static constexpr std::size_t kRawBytes = kLowBytes + kBlockValues + kExtraPlanes * kPlaneBytes;
  static constexpr unsigned kExponentMask = (1u << exponent_bits) - 1;
  static constexpr unsigned kMostBits = 5;
  static constexpr unsigned kZeroCode = 8;  // in the first byte

  using Words = std::array<Word, kBlockValues>;
  using Halves = std::array<std::uint16_t, kBlockValues>;

  struct Width {
    unsigned bits = 0;
    std::size_t escape_count = 0;
    std::size_t bytes() const { return bits * kPlaneBytes + escape_count; }
  };

  /// The cheapest one.
  static POSEIDON_INLINE Width best_width(const BlockBytes& distances) {
    if (largest(distances) == 0) return {};
    Width best{8 * sizeof(Word), 0};  // too large to shrink
    for (unsigned bits = 1; bits <= kMostBits; ++bits) {
      const Width width{bits, count_at_least(distances, (1u << bits) - 1)};
      if (width.escape_count <= kMostEscapes && width.bytes() < best.bytes()) best = width;
      if (width.escape_count == 0) break;
    }
    return best;
  }

  /// Gives zeros a code of their own if that takes fewer bytes.
  static POSEIDON_INLINE bool take_zero_code(const BlockBytes& exponents, std::uint8_t top, BlockBytes& distances,
                                             Width& width) {
    if (count_at_least(exponents, 1) == kBlockValues) return false;
    BlockBytes others;
    for (std::size_t i = 0; i < kBlockValues; ++i)
      others[i] = static_cast<std::uint8_t>(exponents[i] == 0 ? 0 : top + 1 - exponents[i]);
    const Width found = best_width(others);
    if (found.bytes() >= width.bytes()) return false;
    distances = others;
    width = found;
    return true;
  }

  static POSEIDON_INLINE void take_escapes(BlockBytes& distances, unsigned bits, std::byte* escapes) {
    const auto escape = static_cast<std::uint8_t>((1u << bits) - 1);
    BlockBytes codes;
    for (std::size_t i = 0; i < kBlockValues; ++i) codes[i] = std::min(distances[i], escape);
    for_each_equal(codes, escape, [&](std::size_t i) { *escapes++ = static_cast<std::byte>(distances[i]); });
    distances = codes;
  }

  static POSEIDON_INLINE bool put_escapes(const std::byte* escapes, const Head& head, BlockBytes& distances) {
    const auto escape = static_cast<std::uint8_t>((1u << head.bits) - 1);
    if (count_at_least(distances, escape) != head.escape_count) return false;
    if (head.escape_count > 0)
      for_each_equal(distances, escape, [&](std::size_t i) { distances[i] = byte_at(escapes++); });
    return true;
  }

  /// Writes what is not coded to `raw`, and the exponents. Returns the or of all values.
  static POSEIDON_INLINE Word split(Isa isa, const std::byte* values, std::byte* raw, BlockBytes& exponents) {
    Words words;
    copy_block<sizeof words>(values, reinterpret_cast<std::byte*>(words.data()));
    Word all = 0;
    for (const Word word : words) all = static_cast<Word>(all | word);
    Halves high;
    for (std::size_t i = 0; i < kBlockValues; ++i) high[i] = static_cast<std::uint16_t>(words[i] >> kLowBits);
    if constexpr (kLowBits > 0) {
      Halves low;
      for (std::size_t i = 0; i < kBlockValues; ++i) low[i] = static_cast<std::uint16_t>(words[i]);
      copy_block<sizeof low>(reinterpret_cast<const std::byte*>(low.data()), raw);
    }
    BlockBytes rest;
    for (std::size_t i = 0; i < kBlockValues; ++i)
      exponents[i] = static_cast<std::uint8_t>(high[i] >> kMantissaBits & kExponentMask);
    for (std::size_t i = 0; i < kBlockValues; ++i)
      rest[i] = static_cast<std::uint8_t>(kExtraPlanes > 0 ? high[i] : (high[i] & 0x7f) | (high[i] >> 8 & 0x80));
    copy_block<sizeof rest>(reinterpret_cast<const std::byte*>(rest.data()), raw + kLowBytes);
    if constexpr (kExtraPlanes > 0) {
      for (std::size_t i = 0; i < kBlockValues; ++i)
        rest[i] = static_cast<std::uint8_t>((high[i] >> 8 & 3) | (high[i] >> 13 & 4));
      pack_planes(isa, rest.data(), kExtraPlanes, raw + kLowBytes + kBlockValues);
    }
    return all;
  }

  /// The opposite.
  static POSEIDON_INLINE void join(Isa isa, const std::byte* raw, const BlockBytes& exponents, std::byte* values) {
    BlockBytes rest;
    copy_block<sizeof rest>(raw + kLowBytes, reinterpret_cast<std::byte*>(rest.data()));
    Halves high;
    if constexpr (kExtraPlanes > 0) {
      BlockBytes extra;
      unpack_planes(isa, raw + kLowBytes + kBlockValues, kExtraPlanes, extra.data());
      for (std::size_t i = 0; i < kBlockValues; ++i)
        high[i] = static_cast<std::uint16_t>((extra[i] & 4) << 13 | exponents[i] << kMantissaBits |
                                             (extra[i] & 3) << 8 | rest[i]);
    } else {
      for (std::size_t i = 0; i < kBlockValues; ++i)
        high[i] = static_cast<std::uint16_t>((rest[i] & 0x80) << 8 | exponents[i] << kMantissaBits | (rest[i] & 0x7f));
    }
    if constexpr (kLowBits == 0) {
      copy_block<sizeof high>(reinterpret_cast<const std::byte*>(high.data()), values);
    } else {
      Halves low;
      copy_block<sizeof low>(raw, reinterpret_cast<std::byte*>(low.data()));
      Words words;
      for (std::size_t i = 0; i < kBlockValues; ++i) words[i] = Word{high[i]} << kLowBits | Word{low[i]};
      copy_block<sizeof words>(reinterpret_cast<const std::byte*>(words.data()), values);
    }
  }
};

}  // namespace poseidon::kernel
