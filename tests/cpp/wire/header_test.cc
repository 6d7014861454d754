// The header: encoding and decoding gives an equal header, and each invalid field is named.
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
    header.kind = static_cast<Kind>(1 + random() % static_cast<std::size_t>(kLastKind));
    header.priority = static_cast<std::uint16_t>(random() % kPriorityLevels);
    header.rank = static_cast<std::uint32_t>(random());
    header.unit = static_cast<std::uint32_t>(random());
    header.chunk = static_cast<std::uint32_t>(random());
    header.step = random();
    header.payload_bytes = random() % (kMaxPayloadBytes + 1);
    const KindInfo& info = info_of(header.kind);
    if (info.has_dtype) header.body[0] = static_cast<std::byte>(1 + random() % 7);
    header.body[1] = static_cast<std::byte>(random() & info.flags);
    if (info.has_code) header.body[2] = static_cast<std::byte>(random());
    for (std::size_t at = 0; at < info.number_bytes; ++at) header.body[4 + at] = static_cast<std::byte>(random());
    const Bytes bytes = encoded(header);
    const auto decoded = decode(bytes);
    ASSERT_TRUE(decoded.ok()) << decoded.status().message();
    EXPECT_EQ(encoded(decoded.value()), bytes);
    EXPECT_EQ(decoded.value(), header);
  }
}

TEST(Header, StartsWithTheMagicNumberAndIsLittleEndian) {
  Header header;
  header.rank = 0x01020304;
  const Bytes bytes = encoded(header);
  EXPECT_EQ(std::memcmp(bytes.data(), "PSD1", 4), 0);
  EXPECT_EQ(bytes[24], std::byte{4});
  EXPECT_EQ(bytes[27], std::byte{1});
}

TEST(Header, RejectsEveryFieldThatCannotBe) {
  expect_rejected(with_field(0, std::uint32_t{0x31445351}), "magic");
  expect_rejected(with_field(4, std::uint8_t{1}), "version 1");
  expect_rejected(with_field(4, std::uint8_t{2}), "version 2");
  expect_rejected(with_field(5, std::uint8_t{0}), "kind 0");
  expect_rejected(with_field(5, std::uint8_t{14}), "kind 14");
  expect_rejected(with_field(6, std::uint16_t{kPriorityLevels}), "priority 1024");
  expect_rejected(with_field(6, std::uint16_t{0xffff}), "priority 65535");
  expect_rejected(with_field(8, kMaxPayloadBytes + 1), "payload");
  expect_rejected(with_field(8, ~std::uint64_t{0}), "payload");
}

TEST(Header, RejectsWhatABodyOfItsKindDoesNotHave) {
  for (std::uint8_t number = 1; number <= static_cast<std::uint8_t>(kLastKind); ++number) {
    Header header;
    header.kind = static_cast<Kind>(number);
    const KindInfo& info = info_of(header.kind);
    if (info.has_dtype) header.body[0] = std::byte{1};
    ASSERT_TRUE(decode(encoded(header)).ok()) << info.name;
    const auto expect_bad_byte = [&](std::size_t at, std::uint8_t value, const std::string& word) {
      Header bad = header;
      bad.body[at] = std::byte{value};
      expect_rejected(encoded(bad), word);
    };
    for (const std::uint8_t dtype : {0, 9, 255})
      if (info.has_dtype || dtype != 0) expect_bad_byte(0, dtype, "dtype");
    for (unsigned bit = 1; bit < 256; bit *= 2)
      if ((info.flags & bit) == 0) expect_bad_byte(1, static_cast<std::uint8_t>(bit), "flags");
    if (!info.has_code) expect_bad_byte(2, 1, "reserved");
    expect_bad_byte(3, 1, "reserved");
    for (std::size_t at = 4 + std::size_t{info.number_bytes}; at < kBodyBytes; ++at) expect_bad_byte(at, 1, "reserved");
  }
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
  Header header;
  header.priority = 0x0201;
  EXPECT_EQ(encoded(header)[6], std::byte{1});
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

}  // namespace
}  // namespace poseidon::wire
