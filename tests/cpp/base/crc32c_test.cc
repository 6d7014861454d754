#include "base/crc32c.h"

#include <gtest/gtest.h>

#include <random>
#include <string_view>
#include <vector>

namespace poseidon {
namespace {

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

// RFC 3720, B.4, and the check value of the algorithm.
TEST(Crc32c, HasThePublishedValues) {
  EXPECT_EQ(crc32c({}), 0u);
  EXPECT_EQ(crc32c(bytes_of("123456789")), 0xe3069283u);
  std::vector<std::byte> block(32);
  EXPECT_EQ(crc32c(block), 0x8a9136aau);
  for (auto& byte : block) byte = std::byte{0xff};
  EXPECT_EQ(crc32c(block), 0x62a8ab43u);
  for (std::size_t i = 0; i < block.size(); ++i) block[i] = static_cast<std::byte>(i);
  EXPECT_EQ(crc32c(block), 0x46dd794eu);
}

TEST(Crc32c, IsTheSameByTableAndInPieces) {
  std::mt19937 random(1);
  std::vector<std::byte> data(1000);
  for (auto& byte : data) byte = static_cast<std::byte>(random());
  for (std::size_t size = 0; size < 80; ++size) {
    const std::span<const std::byte> some = std::span(data).subspan(size, size * 11);
    EXPECT_EQ(crc32c_by_table(some), crc32c(some)) << size;
    EXPECT_EQ(crc32c(some.subspan(size), crc32c(some.first(size))), crc32c(some)) << size;
  }
}

TEST(Crc32c, NoticesEveryFlippedBit) {
  std::vector<std::byte> data(100, std::byte{7});
  const auto whole = crc32c(data);
  for (std::size_t bit = 0; bit < data.size() * 8; ++bit) {
    data[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    EXPECT_NE(crc32c(data), whole) << bit;
    data[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
  }
}

}  // namespace
}  // namespace poseidon
