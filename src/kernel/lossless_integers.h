// Blocks of integers most of which are small: their lowest w bits, and what is above of those that are larger.
//
//   0x20 + w | number of escapes | bytes and planes of the lowest w bits | escapes: place, 16 bits above
//
// Eight bits of all values are a byte each. The bits that remain are planes.
#pragma once

#include <bit>
#include <cstring>

#include "kernel/lossless_block.h"

namespace poseidon::kernel {

template <typename Word>
class IntegerBlock {
 public:
  using Value = Word;
  static constexpr std::size_t kHeadBytes = 2;

  /// As in FloatBlock.
  struct Head {
    explicit Head(const std::byte* at) : bits(byte_at(at) - unsigned{kCodedBlock}), escape_count(byte_at(at + 1)) {}
    Head(unsigned width_bits, std::size_t escapes) : bits(width_bits), escape_count(escapes) {}
    bool valid() const { return bits <= kMostBits; }
    std::size_t block_bytes() const { return kHeadBytes + bits * kPlaneBytes + escape_count * kEscapeBytes; }
    unsigned bits;
    std::size_t escape_count;
  };

  static POSEIDON_INLINE std::size_t encode(Isa isa, const std::byte* values, std::byte* out, bool& zeros) {
    Words words;
    std::memcpy(words.data(), values, sizeof words);
    BlockBytes lengths;
    for (std::size_t i = 0; i < kBlockValues; ++i) lengths[i] = static_cast<std::uint8_t>(std::bit_width(words[i]));
    const unsigned longest = largest(lengths);
    zeros = longest == 0;
    if (zeros) return 0;
    const Head head = best_head(lengths, longest);
    if (head.block_bytes() >= sizeof words) return 0;
    out[0] = static_cast<std::byte>(kCodedBlock + head.bits);
    out[1] = static_cast<std::byte>(head.escape_count);
    std::byte* at = out + kHeadBytes;
    BlockBytes bytes;
    for (unsigned done = 0; done < head.bits; done += 8) {
      for (std::size_t i = 0; i < kBlockValues; ++i) bytes[i] = static_cast<std::uint8_t>(words[i] >> done);
      const unsigned planes = std::min(head.bits - done, 8u);
      if (planes == 8)
        std::memcpy(at, bytes.data(), sizeof bytes);
      else
        pack_planes(isa, bytes.data(), planes, at);
      at += planes * kPlaneBytes;
    }
    if (head.escape_count > 0) write_escapes(words, lengths, head.bits, at);
    return head.block_bytes();
  }

  static POSEIDON_INLINE bool decode(Isa isa, const std::byte* coded, const Head& head, std::byte* values) {
    Words words{};
    const std::byte* at = coded + kHeadBytes;
    BlockBytes bytes;
    for (unsigned done = 0; done < head.bits; done += 8) {
      const unsigned planes = std::min(head.bits - done, 8u);
      if (planes == 8)
        std::memcpy(bytes.data(), at, sizeof bytes);
      else
        unpack_planes(isa, at, planes, bytes.data());
      at += planes * kPlaneBytes;
      for (std::size_t i = 0; i < kBlockValues; ++i)
        words[i] = static_cast<Word>(words[i] | static_cast<Word>(bytes[i]) << done);
    }
    if (!read_escapes(at, head, words)) return false;
    std::memcpy(values, words.data(), sizeof words);
    return true;
  }

 private:
  static constexpr unsigned kMostBits = 8 * sizeof(Word);
  static constexpr unsigned kEscapeBits = 16;
  static constexpr std::size_t kEscapeBytes = 1 + kEscapeBits / 8;

  using Words = std::array<Word, kBlockValues>;

  /// The cheapest one.
  static POSEIDON_INLINE Head best_head(const BlockBytes& lengths, unsigned longest) {
    Head best{longest, 0};
    for (unsigned bits = longest; bits-- > 0 && longest - bits <= kEscapeBits;) {
      const Head head{bits, count_at_least(lengths, bits + 1)};
      if (head.escape_count > kMostEscapes || head.escape_count * kEscapeBytes > best.block_bytes()) break;
      if (head.block_bytes() < best.block_bytes()) best = head;
    }
    return best;
  }

  static POSEIDON_INLINE void write_escapes(const Words& words, const BlockBytes& lengths, unsigned bits,
                                            std::byte* at) {
    BlockBytes longer;
    for (std::size_t i = 0; i < kBlockValues; ++i) longer[i] = lengths[i] > bits ? 1 : 0;
    for_each_equal(longer, 1, [&](std::size_t i) {
      const auto above = static_cast<std::uint16_t>(std::uint64_t{words[i]} >> bits);
      *at++ = static_cast<std::byte>(i);
      std::memcpy(at, &above, sizeof above);
      at += sizeof above;
    });
  }

  static bool read_escapes(const std::byte* at, const Head& head, Words& words) {
    for (std::size_t n = 0; n < head.escape_count; ++n, at += kEscapeBytes) {
      std::uint16_t above = 0;
      std::memcpy(&above, at + 1, sizeof above);
      const std::uint64_t bits = std::uint64_t{above} << head.bits;
      if (bits >> kMostBits != 0) return false;
      words[byte_at(at)] = static_cast<Word>(words[byte_at(at)] | bits);
    }
    return true;
  }
};

}  // namespace poseidon::kernel
