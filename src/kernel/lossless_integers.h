// Blocks of integers that are small, but of very different sizes, as the differences of updated parameters are.
//
//   0x20 + w | n + 64 c | size | bytes and planes of the lowest w bits | c planes of classes | bits of the larger ones
//
// No value of the block has more than n bits. A value's class says how many it has: class 0, at most w; class j, w + j;
// the last class, 2^c - 1, at least so many. What is above the lowest w bits follows plane by plane, in `size` bytes
// together: of each plane the bits of those values that have them. Of the classes between the first and the last the
// highest bit is left out, because it is 1. Eight of the lowest bits of all values are a byte each; the bits that
// remain are planes.
#pragma once

#include <array>
#include <bit>
#include <cstring>
#include <span>

#include "kernel/lossless_block.h"

namespace poseidon::kernel {

/// A signed integer as one that is small where its magnitude is: its sign is the lowest bit.
template <typename Word>
POSEIDON_INLINE Word fold(Word number) {
  const auto sign = static_cast<Word>(number >> (8 * sizeof(Word) - 1));
  return static_cast<Word>(static_cast<Word>(number << 1) ^ static_cast<Word>(Word{0} - sign));
}

template <typename Word>
POSEIDON_INLINE Word unfold(Word folded) {
  return static_cast<Word>(static_cast<Word>(folded >> 1) ^ static_cast<Word>(Word{0} - (folded & 1)));
}

template <typename Word>
class IntegerBlock {
 public:
  using Value = Word;
  static constexpr std::size_t kHeadBytes = 4;

  /// As in FloatBlock.
  struct Head {
    explicit Head(const std::byte* at)
        : bits(byte_at(at) - unsigned{kCodedBlock}),
          most_bits(byte_at(at + 1) % 64u),
          class_bits(byte_at(at + 1) / 64u) {
      std::memcpy(&above_bytes, at + 2, sizeof above_bytes);
    }
    Head(unsigned width, unsigned longest, unsigned class_width)
        : bits(width), most_bits(longest), class_bits(class_width) {}

    unsigned last_class() const { return (1u << class_bits) - 1; }
    bool valid() const {
      return most_bits <= kMostBits && bits + last_class() <= most_bits && (class_bits > 0 || bits == most_bits) &&
             above_bytes <= kMostAboveBytes;
    }
    std::size_t planes_bytes() const { return std::size_t{bits + class_bits} * kPlaneBytes; }
    std::size_t block_bytes() const { return kHeadBytes + planes_bytes() + above_bytes; }
    /// The lowest class whose values have a bit in the plane, which is not among the lowest `bits`, and do not leave it
    /// out.
    unsigned class_with(unsigned plane) const { return std::min(plane - bits + 2, last_class()); }
    void write(std::byte* at) const {
      at[0] = static_cast<std::byte>(kCodedBlock + bits);
      at[1] = static_cast<std::byte>(most_bits | class_bits << 6);
      std::memcpy(at + 2, &above_bytes, sizeof above_bytes);
    }

    unsigned bits;
    unsigned most_bits;
    unsigned class_bits;
    std::uint16_t above_bytes = 0;
  };

  static POSEIDON_INLINE std::size_t encode(Isa isa, const std::byte* values, std::byte* out, bool& zeros) {
    Words words;
    copy_block<sizeof words>(values, reinterpret_cast<std::byte*>(words.data()));
    BlockBytes lengths;
    measure(isa, words, lengths);
    Head head = best_head(lengths);
    zeros = head.most_bits == 0;
    if (zeros || head.planes_bytes() >= sizeof words) return 0;
    std::byte* at = out + kHeadBytes;
    at = pack_low(isa, words, 0, head.bits, at);
    if (head.class_bits > 0) {
      BlockBytes classes;
      const auto least = static_cast<std::uint8_t>(head.bits);
      const auto most = static_cast<std::uint8_t>(head.last_class());
      for (std::size_t i = 0; i < kBlockValues; ++i) {
        const auto above = static_cast<std::uint8_t>(lengths[i] > least ? lengths[i] - least : 0);
        classes[i] = above < most ? above : most;
      }
      pack_planes(isa, classes.data(), head.class_bits, at);
      Planes planes;
      pack_low(isa, words, head.bits, head.most_bits, reinterpret_cast<std::byte*>(planes.data()), true);
      const Masks masks(head, at);
      std::array<std::byte, kMostAboveBytes + sizeof(std::uint64_t)> above;
      const auto count = pack_chosen(isa, std::span(planes).first(masks.count()), masks.all(), above.data());
      head.above_bytes = static_cast<std::uint16_t>(count);
      if (head.block_bytes() >= sizeof words) return 0;
      std::memcpy(at + head.class_bits * kPlaneBytes, above.data(), count);
    }
    head.write(out);
    return head.block_bytes();
  }

  static POSEIDON_INLINE bool decode(Isa isa, const std::byte* coded, const Head& head, std::byte* values) {
    Words words;
    clear_block<sizeof words>(reinterpret_cast<std::byte*>(words.data()));
    const std::byte* at = unpack_low(isa, coded + kHeadBytes, 0, head.bits, words);
    if (head.class_bits > 0) {
      const Masks masks(head, at);
      if (masks.bytes() != head.above_bytes) return false;
      BlockBytes classes;
      unpack_planes(isa, at, head.class_bits, classes.data());
      at += head.class_bits * kPlaneBytes;
      Planes planes;
      unpack_chosen(isa, {at, head.above_bytes}, masks.all(), std::span(planes).first(masks.count()));
      unpack_low(isa, reinterpret_cast<const std::byte*>(planes.data()), head.bits, head.most_bits, words, true);
      std::array<Word, 8> highest{};
      for (unsigned j = 1; j < head.last_class(); ++j) highest[j] = static_cast<Word>(Word{1} << (head.bits + j - 1));
      for (std::size_t i = 0; i < kBlockValues; ++i) words[i] = static_cast<Word>(words[i] | highest[classes[i]]);
    } else if (head.above_bytes != 0) {
      return false;
    }
    copy_block<sizeof words>(reinterpret_cast<const std::byte*>(words.data()), values);
    return true;
  }

 private:
  static constexpr unsigned kMostBits = 8 * sizeof(Word);
  static constexpr std::size_t kMostAboveBytes = kMostBits * kPlaneBytes;
  static constexpr unsigned kMostClassBits = 3;

  using Words = std::array<Word, kBlockValues>;
  using Planes = std::array<PlaneWords, kMostBits>;

  /// Which values have a bit in each plane above the lowest.
  class Masks {
   public:
    Masks(const Head& head, const std::byte* class_planes) : count_(head.most_bits - head.bits) {
      std::array<PlaneWords, kMostClassBits> classes;
      for (unsigned bit = 0; bit < head.class_bits; ++bit)
        std::memcpy(&classes[bit], class_planes + bit * kPlaneBytes, kPlaneBytes);
      for (unsigned plane = 0; plane < count_; ++plane) {
        const unsigned least = head.class_with(head.bits + plane);
        if (plane > 0 && least == head.class_with(head.bits + plane - 1))
          masks_[plane] = masks_[plane - 1];
        else
          for (std::size_t i = 0; i < masks_[plane].size(); ++i)
            masks_[plane][i] = at_least(classes, head.class_bits, i, least);
      }
    }

    std::size_t count() const { return count_; }
    std::span<const PlaneWords> all() const { return std::span(masks_).first(count_); }
    std::size_t bytes() const {
      std::size_t bits = 0;
      for (const PlaneWords& mask : all())
        for (const std::uint64_t word : mask) bits += static_cast<std::size_t>(std::popcount(word));
      return (bits + 7) / 8;
    }

   private:
    /// Of 64 classes, given as bits, those that are at least `least`.
    static std::uint64_t at_least(const std::array<PlaneWords, kMostClassBits>& classes, unsigned class_bits,
                                  std::size_t word, unsigned least) {
      std::uint64_t larger = 0;
      std::uint64_t same = ~std::uint64_t{0};
      for (unsigned bit = class_bits; bit-- > 0;) {
        if ((least >> bit & 1) == 0) larger |= same & classes[bit][word];
        same &= (least >> bit & 1) != 0 ? classes[bit][word] : ~classes[bit][word];
      }
      return larger | same;
    }

    std::size_t count_;
    Planes masks_;
  };

  /// How long a block's values are.
  class Lengths {
   public:
    POSEIDON_INLINE explicit Lengths(const BlockBytes& lengths) : longest_(largest(lengths)) {
      unsigned bits = longest_;
      for (; bits > 0 && longer_[bits + 1] < kBlockValues; --bits)
        longer_[bits] = static_cast<unsigned>(count_at_least(lengths, bits));
      for (++bits; bits-- > 0;) longer_[bits] = kBlockValues;
      for (bits = 0; bits <= kMostBits; ++bits) sums_[bits + 1] = sums_[bits] + longer_[bits];
    }

    unsigned longest() const { return longest_; }
    /// How many bits a block of so many lowest bits takes, in classes up to `last`.
    std::size_t cost(unsigned bits, unsigned last, unsigned class_bits) const {
      const unsigned all = bits + last;  // from so many bits on a value has all of the block's
      return (bits + class_bits) * kBlockValues + (last > 2 ? sums_[all] - sums_[bits + 2] : 0) +
             std::size_t{longer_[all]} * (longest_ - (last > 2 ? all - 2 : bits));
    }
    /// A number of lowest bits with which about as many values are in the first class as in another one.
    unsigned even(unsigned class_bits) const {
      unsigned bits = 0;
      while (bits < longest_ && longer_[bits + 1] > kBlockValues - (kBlockValues >> class_bits)) ++bits;
      return bits;
    }

   private:
    std::array<unsigned, kMostBits + 2> longer_{};  // how many values have at least so many bits
    std::array<unsigned, kMostBits + 2> sums_{};    // of `longer_` before
    unsigned longest_;
  };

  /// The bits that each value has.
  static POSEIDON_INLINE void measure(Isa isa, const Words& words, BlockBytes& lengths) {
    if (isa == Isa::v4 || isa == Isa::neon) {  // which count leading zeros of many values at once
      for (std::size_t i = 0; i < kBlockValues; ++i) lengths[i] = static_cast<std::uint8_t>(std::bit_width(words[i]));
      return;
    }
    constexpr std::uint32_t kOfNone = 126;  // a float's exponent of 1, less one
    std::array<float, kBlockValues> floats;
    std::array<std::uint32_t, kBlockValues> exponents;
    // As a float has them in its exponent. No value is rounded up to the next power of two, because of two ones in a
    // row only the first is left.
    for (std::size_t i = 0; i < kBlockValues; ++i) {
      const std::uint32_t word = words[i];
      floats[i] = static_cast<float>(static_cast<std::int32_t>((word & ~(word >> 1)) & 0x7fffffff));
    }
    copy_block<sizeof floats>(reinterpret_cast<const std::byte*>(floats.data()),
                              reinterpret_cast<std::byte*>(exponents.data()));
    for (std::size_t i = 0; i < kBlockValues; ++i) {
      const std::uint32_t exponent = exponents[i] >> 23;
      const std::uint32_t length = exponent > kOfNone ? exponent - kOfNone : 0;
      exponents[i] = kMostBits == 32 && static_cast<std::int32_t>(words[i]) < 0 ? 32 : length;
    }
    for (std::size_t i = 0; i < kBlockValues; ++i) lengths[i] = static_cast<std::uint8_t>(exponents[i]);
  }

  /// A cheap one: of those near even classes the cheapest.
  static POSEIDON_INLINE Head best_head(const BlockBytes& all_lengths) {
    const Lengths lengths(all_lengths);
    const unsigned longest = lengths.longest();
    Head best(longest, longest, 0);
    std::size_t fewest = longest * kBlockValues;
    for (unsigned class_bits = 1; class_bits <= kMostClassBits; ++class_bits) {
      const unsigned last = (1u << class_bits) - 1;
      if (last > longest) break;
      const unsigned even = std::min(lengths.even(class_bits), longest - last);
      for (unsigned bits = even - std::min(even, 2u); bits <= std::min(even + 1, longest - last); ++bits) {
        const std::size_t cost = lengths.cost(bits, last, class_bits);
        if (cost >= fewest) continue;
        fewest = cost;
        best = Head(bits, longest, class_bits);
      }
    }
    return best;
  }

  /// Writes the bits of all words from `begin` to `end`, eight together as bytes unless they are to be `planes`.
  static POSEIDON_INLINE std::byte* pack_low(Isa isa, const Words& words, unsigned begin, unsigned end, std::byte* at,
                                             bool planes = false) {
    BlockBytes bytes;
    for (unsigned done = begin; done < end; done += 8) {
      for (std::size_t i = 0; i < kBlockValues; ++i) bytes[i] = static_cast<std::uint8_t>(words[i] >> done);
      const unsigned count = std::min(end - done, 8u);
      if (count == 8 && !planes)
        std::memcpy(at, bytes.data(), sizeof bytes);
      else
        pack_planes(isa, bytes.data(), count, at);
      at += count * kPlaneBytes;
    }
    return at;
  }

  /// The opposite.
  static POSEIDON_INLINE const std::byte* unpack_low(Isa isa, const std::byte* at, unsigned begin, unsigned end,
                                                     Words& words, bool planes = false) {
    BlockBytes bytes;
    for (unsigned done = begin; done < end; done += 8) {
      const unsigned count = std::min(end - done, 8u);
      if (count == 8 && !planes)
        std::memcpy(bytes.data(), at, sizeof bytes);
      else
        unpack_planes(isa, at, count, bytes.data());
      at += count * kPlaneBytes;
      for (std::size_t i = 0; i < kBlockValues; ++i)
        words[i] = static_cast<Word>(words[i] | static_cast<Word>(bytes[i]) << done);
    }
    return at;
  }
};

/// Blocks of signed bytes. The scales that lie among those of DType::int8_blocks are a few large ones.
class SignedByteBlock {
 public:
  using Value = std::uint8_t;
  using Head = IntegerBlock<Value>::Head;
  static constexpr std::size_t kHeadBytes = IntegerBlock<Value>::kHeadBytes;

  static POSEIDON_INLINE std::size_t encode(Isa isa, const std::byte* values, std::byte* out, bool& zeros) {
    BlockBytes bytes;
    copy_block<sizeof bytes>(values, reinterpret_cast<std::byte*>(bytes.data()));
    for (std::uint8_t& byte : bytes) byte = fold(byte);
    return IntegerBlock<Value>::encode(isa, reinterpret_cast<const std::byte*>(bytes.data()), out, zeros);
  }

  static POSEIDON_INLINE bool decode(Isa isa, const std::byte* coded, const Head& head, std::byte* values) {
    BlockBytes bytes;
    if (!IntegerBlock<Value>::decode(isa, coded, head, reinterpret_cast<std::byte*>(bytes.data()))) return false;
    for (std::uint8_t& byte : bytes) byte = unfold(byte);
    copy_block<sizeof bytes>(reinterpret_cast<const std::byte*>(bytes.data()), values);
    return true;
  }
};

}  // namespace poseidon::kernel
