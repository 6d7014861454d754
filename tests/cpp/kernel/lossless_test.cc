#include "kernel/lossless.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "cpp/kernel/arrays.h"
#include "kernel/half_bits.h"
#include "kernel/int8_blocks.h"
#include "poseidon/dtype.h"

namespace poseidon::kernel {
namespace {

constexpr Coding kCodings[] = {Coding::float32,      Coding::float16,      Coding::bfloat16,
                               Coding::difference32, Coding::difference16, Coding::int8};

/// Codes the values. The memory is as large as it has to be, so that a sanitizer sees a byte too many.
Bytes coded(Coding coding, const Bytes& values, Isa isa = best_isa()) {
  const std::size_t count = values.size() / value_bytes(coding);
  Bytes out(most_coded_bytes(coding, count));
  out.resize(encode_lossless(coding, values.data(), count, out.data(), isa));
  return Bytes(out.begin(), out.end());
}

/// Decodes in pieces of `piece_bytes`.
Bytes decoded(Coding coding, const Bytes& from, std::size_t count, std::size_t piece_bytes, Isa isa = best_isa()) {
  Bytes values(count * value_bytes(coding));
  std::size_t begin = 0;
  std::size_t end = 0;
  std::size_t have = 0;
  while (have < count) {
    const std::size_t before = end;
    end = std::min(end + piece_bytes, from.size());
    const Bytes piece(from.begin() + static_cast<std::ptrdiff_t>(begin),
                      from.begin() + static_cast<std::ptrdiff_t>(end));
    const Decoded done = decode_lossless(coding, piece, values.data() + have * value_bytes(coding), count - have, isa);
    EXPECT_FALSE(done.malformed);
    begin += done.coded_bytes;
    have += done.value_count;
    if (done.malformed || (before == end && done.value_count == 0)) break;
  }
  EXPECT_EQ(have, count);
  EXPECT_EQ(begin, from.size());
  return values;
}

template <typename Word>
Bytes bytes_of(const std::vector<Word>& words) {
  Bytes bytes(words.size() * sizeof(Word));
  std::memcpy(bytes.data(), words.data(), bytes.size());
  return bytes;
}

/// Normally distributed numbers of the coding's type, whose scale changes between runs of 1,000.
Bytes gradients(Coding coding, std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<std::uint32_t> words(count);
  std::vector<std::uint16_t> halves(count);
  std::vector<std::int8_t> bytes(count);
  for (std::size_t i = 0; i < count; ++i) {
    const float value = normal(random) * std::ldexp(1.0F, -static_cast<int>(i / 1000 % 12));
    words[i] = std::bit_cast<std::uint32_t>(value);
    if (coding == Coding::float16) halves[i] = narrow_float16_bits(words[i]);
    if (coding == Coding::bfloat16) halves[i] = narrow_bfloat16_bits(words[i]);
    if (coding == Coding::difference32) words[i] = static_cast<std::uint32_t>(std::fabs(value) * 60'000);
    if (coding == Coding::difference16) halves[i] = static_cast<std::uint16_t>(std::fabs(value) * 6);
    bytes[i] = static_cast<std::int8_t>(std::clamp(value * 30, -127.0F, 127.0F));
  }
  if (coding == Coding::int8) return bytes_of(bytes);
  return value_bytes(coding) == 4 ? bytes_of(words) : bytes_of(halves);
}

TEST(Lossless, EveryKindOfBlockComesBackInPiecesOfEverySize) {
  for (const Coding coding : kCodings) {
    Bytes values = gradients(coding, 3000, 1);
    const std::size_t block = kBlockValues * value_bytes(coding);
    std::memset(values.data() + block, 0, block);          // one block of zeros
    std::memset(values.data() + 3 * block, 0, 3 * block);  // a run of them
    std::mt19937 random(7);
    for (std::size_t i = 7 * block; i < 8 * block; ++i) values[i] = static_cast<std::byte>(random());  // a plain one
    const Bytes small = coded(coding, values);
    for (const std::size_t piece_bytes : {1, 2, 3, 7, 100, 1000, 100'000})
      EXPECT_EQ(decoded(coding, small, 3000, piece_bytes), values) << "coding " << int(coding);
  }
}

TEST(Lossless, EveryPatternOf16BitsComesBack) {
  std::vector<std::uint16_t> all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i * 40503);  // neighbours differ
  std::vector<std::uint16_t> ordered(65536);
  for (std::size_t i = 0; i < all.size(); ++i) ordered[i] = static_cast<std::uint16_t>(i);
  for (const Coding coding : {Coding::float16, Coding::bfloat16, Coding::difference16}) {
    for (const auto& words : {all, ordered}) {
      const Bytes values = bytes_of(words);
      EXPECT_EQ(decoded(coding, coded(coding, values), words.size(), 1 << 20), values);
    }
  }
}

TEST(Lossless, BytesOfBlocksWithScalesComeBackInFewer) {
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  std::vector<float> values(100 * kBlockValues);
  for (float& value : values) value = 1e-3F * normal(random) * normal(random);
  Bytes blocks(dtype_bytes(DType::int8_blocks) * 100);
  encode_int8(best_isa(), values.data(), blocks.data(), values.size());
  const Bytes small = coded(Coding::int8, blocks);
  EXPECT_LT(small.size(), blocks.size() * 9 / 10);
  EXPECT_EQ(decoded(Coding::int8, small, blocks.size(), 1000), blocks);
  for (std::size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<std::byte>(i * 7 % (i / 256 + 1));
  EXPECT_EQ(decoded(Coding::int8, coded(Coding::int8, blocks), blocks.size(), 1000), blocks);
}

TEST(Lossless, PatternsOf32BitsComeBack) {
  // Each exponent, with the signs and mantissas of NaN, infinity, zero and denormals among them.
  std::vector<std::uint32_t> words;
  for (std::uint32_t high = 0; high < 65536; ++high)
    for (const std::uint32_t low : {0x0000u, 0x0001u, 0xffffu}) words.push_back(high << 16 | low);
  for (const Coding coding : {Coding::float32, Coding::difference32}) {
    const Bytes values = bytes_of(words);
    EXPECT_EQ(decoded(coding, coded(coding, values), words.size(), 1 << 20), values);
  }
}

TEST(Lossless, EveryInstructionSetGivesTheSameBytes) {
  for (const Coding coding : kCodings) {
    const Bytes values = gradients(coding, 20'000, 2);
    const Bytes small = coded(coding, values);
    for (const Isa isa : available_isas()) {
      EXPECT_EQ(coded(coding, values, isa), small);
      EXPECT_EQ(decoded(coding, small, 20'000, 1 << 20, isa), values);
    }
  }
}

TEST(Lossless, GradientsShrinkAndZerosTakeNextToNothing) {
  const auto bits = [](Coding coding, const Bytes& values) {
    return 8.0 * static_cast<double>(coded(coding, values).size()) /
           (static_cast<double>(values.size()) / static_cast<double>(value_bytes(coding)));
  };
  EXPECT_LT(bits(Coding::float32, gradients(Coding::float32, 100'000, 3)), 27.6);
  EXPECT_LT(bits(Coding::float16, gradients(Coding::float16, 100'000, 3)), 14.7);
  EXPECT_LT(bits(Coding::bfloat16, gradients(Coding::bfloat16, 100'000, 3)), 11.6);
  const Bytes zeros(std::size_t{4} * kBlockValues * 1000);
  EXPECT_LE(coded(Coding::float32, zeros).size(), 8U);
  EXPECT_EQ(coded(Coding::float32, Bytes(std::size_t{4} * kBlockValues)).size(), 1U);
}

TEST(Lossless, ZerosAmongOtherValuesAreNoEscapes) {
  for (const Coding coding : {Coding::float32, Coding::float16, Coding::bfloat16}) {
    const std::size_t width = value_bytes(coding);
    Bytes values = gradients(coding, 64 * kBlockValues, 3);
    const std::size_t dense_bytes = coded(coding, values).size();
    for (std::size_t i = 0; i < values.size() / width; i += 7) std::memset(values.data() + i * width, 0, width);
    const Bytes small = coded(coding, values);
    EXPECT_LT(small.size(), dense_bytes + dense_bytes / 20) << "coding " << int(coding);
    EXPECT_EQ(decoded(coding, small, values.size() / width, 1 << 20), values);
  }
}

TEST(Lossless, WhatDoesNotShrinkTakesAByteABlockMore) {
  std::mt19937 random(4);
  Bytes noise(std::size_t{4} * 10 * kBlockValues);
  for (std::byte& byte : noise) byte = static_cast<std::byte>(random());
  for (const Coding coding : kCodings) {
    const std::size_t count = noise.size() / value_bytes(coding);
    EXPECT_LE(coded(coding, noise).size(), most_coded_bytes(coding, count));
    EXPECT_EQ(decoded(coding, coded(coding, noise), count, 1 << 20), noise);
  }
}

TEST(Lossless, ADifferenceAndItsBaseGiveTheValues) {
  std::mt19937 random(5);
  for (const std::size_t width : {2, 4}) {
    Bytes base(4000);
    Bytes values(4000);
    for (std::byte& byte : base) byte = static_cast<std::byte>(random());
    for (std::byte& byte : values) byte = static_cast<std::byte>(random());
    std::memset(base.data(), 0, 8);
    std::memset(values.data(), 0xff, 8);
    Bytes between(4000);
    difference(values.data(), base.data(), between.data(), 4000 / width, width);
    add_difference(between.data(), base.data(), between.data(), 4000 / width, width);
    EXPECT_EQ(between, values);
  }
  const std::vector<std::uint32_t> near{100, 103, 97};
  const std::vector<std::uint32_t> from{100, 100, 100};
  std::vector<std::uint32_t> small(3);
  difference(reinterpret_cast<const std::byte*>(near.data()), reinterpret_cast<const std::byte*>(from.data()),
             reinterpret_cast<std::byte*>(small.data()), 3, 4);
  EXPECT_EQ(small, (std::vector<std::uint32_t>{0, 6, 5}));
}

/// What decoding one whole block says of bytes that no encoder makes.
bool is_malformed(Coding coding, Bytes bytes) {
  bytes.resize(std::max<std::size_t>(bytes.size(), 2000));
  Bytes values(kBlockValues * value_bytes(coding));
  return decode_lossless(coding, bytes, values.data(), kBlockValues).malformed;
}

TEST(Lossless, WhatNoEncoderMakesIsMalformed) {
  for (const Coding coding : kCodings) {
    EXPECT_TRUE(is_malformed(coding, {std::byte{0x03}}));                   // no kind of block
    EXPECT_TRUE(is_malformed(coding, {std::byte{0x00}, std::byte{0x01}}));  // more zeros than are wanted
    EXPECT_TRUE(is_malformed(coding, {std::byte{0x20 + 33}}));              // too wide
  }
  EXPECT_TRUE(is_malformed(Coding::float32, {std::byte{0x20}, std::byte{9}, std::byte{1}}));  // escapes of no bits
  EXPECT_TRUE(
      is_malformed(Coding::bfloat16, {std::byte{0x22}, std::byte{9}, std::byte{1}}));  // escapes that are missing
}

/// The head of a block of integers: its lowest bits, the most bits of a value, the bits of its classes, and the bytes
/// of what is above.
Bytes integer_head(int bits, int most_bits, int class_bits, int above_bytes) {
  return {static_cast<std::byte>(0x20 + bits), static_cast<std::byte>(most_bits | class_bits << 6),
          static_cast<std::byte>(above_bytes), static_cast<std::byte>(above_bytes >> 8)};
}

TEST(Lossless, IntegersThatNoEncoderMakesAreMalformed) {
  EXPECT_FALSE(is_malformed(Coding::difference16, integer_head(3, 8, 2, 0)));  // all in the first class
  EXPECT_TRUE(is_malformed(Coding::difference16, integer_head(3, 8, 2, 1)));   // nothing is above
  EXPECT_TRUE(is_malformed(Coding::difference16, integer_head(3, 8, 0, 0)));   // nobody has the bits above
  EXPECT_TRUE(is_malformed(Coding::difference16, integer_head(8, 8, 0, 1)));
  EXPECT_TRUE(is_malformed(Coding::difference16, integer_head(3, 5, 2, 0)));   // more classes than lengths
  EXPECT_TRUE(is_malformed(Coding::difference16, integer_head(3, 17, 2, 0)));  // wider than a value
  EXPECT_TRUE(is_malformed(Coding::difference32, integer_head(3, 33, 2, 0)));
  EXPECT_TRUE(is_malformed(Coding::difference32, integer_head(3, 8, 2, 2000)));  // more than there can be
  Bytes missing = integer_head(0, 8, 1, 0);
  missing.push_back(std::byte{1});  // one value of the last class, whose bits are missing
  EXPECT_TRUE(is_malformed(Coding::difference32, missing));
}

/// Integers with a sign in the lowest bit, of the sizes that updates of parameters have.
std::vector<std::uint32_t> updates(std::size_t count, float rate, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> parameter(0, 0.02F);
  std::normal_distribution<float> normal;
  std::vector<float> before(count);
  std::vector<float> after(count);
  for (std::size_t i = 0; i < count; ++i) {
    before[i] = parameter(random);
    after[i] = before[i] - rate * 0.3F * normal(random) * normal(random);
  }
  std::vector<std::uint32_t> words(count);
  difference(reinterpret_cast<const std::byte*>(after.data()), reinterpret_cast<const std::byte*>(before.data()),
             reinterpret_cast<std::byte*>(words.data()), count, sizeof(float));
  return words;
}

TEST(Lossless, UpdatesOfParametersTakeLittleMoreThanTheirEntropy) {
  for (const float rate : {1e-3F, 1e-4F, 1e-5F}) {
    const auto words = updates(400 * kBlockValues, rate, 8);
    std::array<double, 33> counts{};
    for (const std::uint32_t word : words) ++counts[static_cast<std::size_t>(std::bit_width(word))];
    double entropy = 0;  // of their lengths; all bits below the highest one are random
    for (std::size_t length = 0; length < counts.size(); ++length) {
      const double share = counts[length] / static_cast<double>(words.size());
      if (share > 0) entropy += share * (static_cast<double>(length < 1 ? 0 : length - 1) - std::log2(share));
    }
    const Bytes values = bytes_of(words);
    const Bytes small = coded(Coding::difference32, values);
    EXPECT_LT(8.0 * static_cast<double>(small.size()) / static_cast<double>(words.size()), entropy + 0.6);
    for (const Isa isa : available_isas()) {
      EXPECT_EQ(coded(Coding::difference32, values, isa), small);
      EXPECT_EQ(decoded(Coding::difference32, small, words.size(), 1000, isa), values);
    }
  }
}

TEST(Lossless, IntegersOfAllLengthsComeBack) {
  std::mt19937 random(9);
  for (int round = 0; round < 300; ++round) {
    const unsigned longest = 1 + random() % 32;
    const unsigned shortest = random() % longest;
    std::vector<std::uint32_t> words(4 * kBlockValues);
    std::vector<std::uint16_t> halves(words.size());
    for (std::size_t i = 0; i < words.size(); ++i) {
      const unsigned length = shortest + random() % (longest - shortest + 1);
      words[i] = random() % 5 == 0 ? 0 : static_cast<std::uint32_t>(random()) >> (32 - std::max(length, 1U));
      halves[i] = static_cast<std::uint16_t>(words[i]);
    }
    for (const auto& [coding, values] :
         {std::pair(Coding::difference32, bytes_of(words)), std::pair(Coding::difference16, bytes_of(halves))}) {
      const Bytes small = coded(coding, values);
      for (const Isa isa : available_isas()) {
        ASSERT_EQ(coded(coding, values, isa), small);
        ASSERT_EQ(decoded(coding, small, words.size(), 1 << 20, isa), values);
      }
    }
  }
}

TEST(Lossless, RandomBytesAreDecodedWithinTheirArrays) {
  std::mt19937 random(6);
  for (int round = 0; round < 2000; ++round) {
    const Coding coding = kCodings[random() % std::size(kCodings)];
    Bytes bytes(random() % 3000);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    if (!bytes.empty()) bytes[0] = static_cast<std::byte>(random() % 2 == 0 ? random() % 4 : 0x20 + random() % 34);
    const std::size_t count = random() % 1500;
    Bytes values(count * value_bytes(coding));
    const Decoded done = decode_lossless(coding, bytes, values.data(), count);
    ASSERT_LE(done.coded_bytes, bytes.size());
    ASSERT_LE(done.value_count, count);
  }
}

}  // namespace
}  // namespace poseidon::kernel
