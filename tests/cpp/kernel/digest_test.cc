// The digest of an array: what it has to notice.
#include "poseidon/digest.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

namespace poseidon {
namespace {

std::vector<std::byte> random_bytes(std::size_t size) {
  std::mt19937 random(1);
  std::vector<std::byte> data(size);
  for (auto& byte : data) byte = static_cast<std::byte>(random());
  return data;
}

// The check values of the algorithm.
TEST(Digest, HasThePublishedValues) {
  const auto of = [](std::string_view text) { return digest(std::as_bytes(std::span(text))); };
  EXPECT_EQ(of(""), 0xef46db3751d8e999u);
  EXPECT_EQ(of("abc"), 0x44bc2cf5ad770999u);
  EXPECT_EQ(of("123456789"), 0x8cb841db40e6ae83u);
  EXPECT_EQ(of("Call me Ishmael. Some years ago--never mind how long precisely-"), 0x02a2e85470d6fd96u);
}

TEST(Digest, NoticesEveryFlippedBitAndEveryPairOfHighestBits) {
  for (const std::size_t size : {1, 7, 8, 63, 64, 200, 333}) {
    auto data = random_bytes(size);
    std::set<std::uint64_t> seen{digest(data)};
    for (std::size_t bit = 0; bit < size * 8; ++bit) {
      data[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
      EXPECT_TRUE(seen.insert(digest(data)).second) << "bit " << bit << " of " << size << " bytes";
      data[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    }
    // The signs of two numbers, wherever they lie.
    for (std::size_t i = 7; i < size; i += 8)
      for (std::size_t j = i + 8; j < size; j += 8) {
        data[i] ^= std::byte{0x80}, data[j] ^= std::byte{0x80};
        EXPECT_TRUE(seen.insert(digest(data)).second) << "the signs at " << i << " and " << j;
        data[i] ^= std::byte{0x80}, data[j] ^= std::byte{0x80};
      }
  }
}

TEST(Digest, NoticesOrderAndSize) {
  auto data = random_bytes(256);
  std::set<std::uint64_t> seen{digest(data)};
  for (std::size_t i = 0; i < 32; ++i)
    for (std::size_t j = i + 1; j < 32; ++j) {
      auto swapped = data;
      for (std::size_t byte = 0; byte < 8; ++byte) std::swap(swapped[i * 8 + byte], swapped[j * 8 + byte]);
      EXPECT_TRUE(seen.insert(digest(swapped)).second) << "words " << i << " and " << j;
    }
  std::set<std::uint64_t> zeros;
  for (std::size_t size = 0; size < 300; ++size)
    EXPECT_TRUE(zeros.insert(digest(std::vector<std::byte>(size))).second) << size << " zeros";
}

TEST(Digest, IsOfTheBytesAlone) {
  const auto data = random_bytes(1000);
  for (std::size_t offset = 0; offset < 16; ++offset) {
    std::vector<std::byte> elsewhere(offset);
    elsewhere.insert(elsewhere.end(), data.begin(), data.end());
    EXPECT_EQ(digest(std::span(elsewhere).subspan(offset)), digest(data)) << "at offset " << offset;
  }
}

}  // namespace
}  // namespace poseidon
