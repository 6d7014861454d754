// The header: what goes in comes out, and what does not belong is rejected by name.
#include "wire/header.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <random>
#include <string>

namespace poseidon::wire {
namespace {

using Bytes = std::array<std::byte, kHeaderBytes>;

Bytes encoded(const Header& header) {
  Bytes bytes;
  encode(header, bytes);
  return bytes;
}

template <typename T>
Bytes with_field(std::size_t at, T value) {
  Bytes bytes = encoded(Header{});
  std::memcpy(bytes.data() + at, &value, sizeof value);
  return bytes;
}

void expect_rejected(const Bytes& bytes, const std::string& word) {
  const auto header = decode(bytes);
  ASSERT_FALSE(header.ok()) << word;
  EXPECT_EQ(header.status().code(), ErrorCode::mismatch);
  EXPECT_NE(header.status().message().find(word), std::string::npos) << header.status().message();
}

TEST(Header, RoundTrip) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 1000; ++i) {
    Header header;
    header.kind = static_cast<Kind>(1 + random() % 13);
    header.dtype = static_cast<DType>(1 + random() % 7);
    header.flags = static_cast<std::uint8_t>(random() % 32);
    header.rank = static_cast<std::uint32_t>(random());
    header.worker_count = static_cast<std::uint32_t>(random());
    header.unit = static_cast<std::uint32_t>(random());
    header.chunk = static_cast<std::uint32_t>(random());
    header.step = random();
    header.divisor = static_cast<std::uint32_t>(random());
    header.factor_count = static_cast<std::uint32_t>(random());
    header.rows = static_cast<std::uint32_t>(random());
    header.cols = static_cast<std::uint32_t>(random());
    header.payload_bytes = random() % (kMaxPayloadBytes + 1);
    header.priority = static_cast<std::uint16_t>(random() % kPriorityLevels);
    const Bytes bytes = encoded(header);
    const auto decoded = decode(bytes);
    ASSERT_TRUE(decoded.ok());
    EXPECT_EQ(encoded(decoded.value()), bytes);
    EXPECT_EQ(decoded.value().step, header.step);
    EXPECT_EQ(decoded.value().cols, header.cols);
    EXPECT_EQ(decoded.value().payload_bytes, header.payload_bytes);
    EXPECT_EQ(decoded.value().priority, header.priority);
  }
}

TEST(Header, StartsWithTheMagicNumberAndIsLittleEndian) {
  Header header;
  header.rank = 0x01020304;
  const Bytes bytes = encoded(header);
  EXPECT_EQ(std::memcmp(bytes.data(), "PSD1", 4), 0);
  EXPECT_EQ(bytes[8], std::byte{4});
  EXPECT_EQ(bytes[11], std::byte{1});
}

TEST(Header, RejectsEveryFieldThatCannotBe) {
  expect_rejected(with_field(0, std::uint32_t{0x31445351}), "magic");
  expect_rejected(with_field(4, std::uint8_t{1}), "version 1");
  expect_rejected(with_field(5, std::uint8_t{0}), "kind 0");
  expect_rejected(with_field(5, std::uint8_t{14}), "kind 14");
  expect_rejected(with_field(6, std::uint8_t{0}), "dtype");
  expect_rejected(with_field(6, std::uint8_t{8}), "dtype");
  expect_rejected(with_field(7, std::uint8_t{0x80}), "flags");
  expect_rejected(with_field(48, kMaxPayloadBytes + 1), "payload");
  expect_rejected(with_field(48, ~std::uint64_t{0}), "payload");
  expect_rejected(with_field(56, std::uint16_t{kPriorityLevels}), "priority 1024");
  expect_rejected(with_field(56, std::uint16_t{0xffff}), "priority 65535");
  expect_rejected(with_field(58, std::uint8_t{1}), "reserved");
  expect_rejected(with_field(63, std::uint8_t{1}), "reserved");
}

TEST(Header, CarriesEveryPriority) {
  for (std::uint16_t priority = kFirstPriority; priority <= kLastPriority; ++priority) {
    Header header;
    header.priority = priority;
    const auto decoded = decode(encoded(header));
    ASSERT_TRUE(decoded.ok()) << decoded.status().message();
    ASSERT_EQ(decoded.value().priority, priority);
  }
  EXPECT_EQ(Header().priority, kFirstPriority);
  EXPECT_EQ(encoded({.priority = 0x0201})[56], std::byte{1});
}

TEST(Header, AnyBytesDecodeOrAreRejected) {
  std::mt19937_64 random(11);
  for (int i = 0; i < 20000; ++i) {
    Bytes bytes = encoded(Header{});
    for (int change = 0; change < 3; ++change) bytes[random() % kHeaderBytes] = static_cast<std::byte>(random());
    const auto header = decode(bytes);
    if (header.ok()) EXPECT_EQ(encoded(header.value()), bytes);
  }
}

TEST(Sizes, OfFactorsAndMatrices) {
  Header header;
  header.dtype = DType::float64;
  header.factor_count = 3;
  header.rows = 5;
  header.cols = 7;
  EXPECT_EQ(factor_bytes(header), 3u * (5 + 7) * 8);
  EXPECT_EQ(matrix_bytes(header), 5u * 7 * 8);
  header.factor_count = 0;
  EXPECT_EQ(factor_bytes(header), 0u);
}

TEST(Sizes, ThatAreTooLargeAreNone) {
  Header header;
  header.rows = header.cols = 0xffffffffu;
  header.factor_count = 0xffffffffu;
  EXPECT_EQ(factor_bytes(header), std::nullopt);
  EXPECT_EQ(matrix_bytes(header), std::nullopt);
  header.rows = 1u << 16;
  header.cols = 1u << 16;
  header.dtype = DType::float32;  // exactly the limit
  EXPECT_EQ(matrix_bytes(header), kMaxPayloadBytes);
  header.cols += 1;
  EXPECT_EQ(matrix_bytes(header), std::nullopt);
  header.factor_count = kUnboundedFactors;
  header.rows = header.cols = 1u << 20;
  EXPECT_EQ(factor_bytes(header), std::nullopt);
}

}  // namespace
}  // namespace poseidon::wire
