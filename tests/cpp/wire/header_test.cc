// The header: encoding and decoding gives an equal header, and each invalid field is named.
#include "wire/header.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <string>

#include "wire/body.h"

namespace poseidon::wire {
namespace {

using HeaderBytes = std::array<std::byte, kHeaderBytes>;

HeaderBytes encoded(const Header& header) {
  HeaderBytes bytes;
  encode(header, bytes);
  return bytes;
}

template <typename T>
HeaderBytes with_field(std::size_t at, T value) {
  HeaderBytes bytes = encoded(Header{});
  std::memcpy(bytes.data() + at, &value, sizeof value);
  return bytes;
}

void expect_rejected(const HeaderBytes& bytes, const std::string& word) {
  Header header;
  header.chunk = 77;
  const Header before = header;
  const Status status = decode(bytes, header);
  ASSERT_FALSE(status.ok()) << word;
  EXPECT_EQ(status.code(), ErrorCode::mismatch);
  EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
  EXPECT_EQ(header, before);
}

void expect_decoded(const HeaderBytes& bytes, const Header& expected) {
  Header header;
  const Status status = decode(bytes, header);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(header, expected);
}

TEST(Header, RoundTrip) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 1000; ++i) {
    Header header;
    header.kind = static_cast<Kind>(1 + random() % (kKinds.size() - 1));
    header.priority = static_cast<std::uint16_t>(random() % kPriorityLevels);
    header.rank = static_cast<std::uint32_t>(random());
    header.unit = static_cast<std::uint32_t>(random());
    header.chunk = static_cast<std::uint32_t>(random());
    header.step = random();
    header.payload_bytes = random() % (kMaxPayloadBytes + 1);
    const BodyShape& shape = shape_of(header.kind);
    for (std::size_t at = 0; at < kBodyBytes; ++at)
      header.body[at] = static_cast<std::byte>(random() & shape.may_have[at]);
    if (shape.has_dtype) header.body[0] = static_cast<std::byte>(1 + random() % 7);
    expect_decoded(encoded(header), header);
  }
}

TEST(Header, StartsWithTheMagicNumberAndIsLittleEndian) {
  Header header;
  header.rank = 0x01020304;
  const HeaderBytes bytes = encoded(header);
  EXPECT_EQ(std::memcmp(bytes.data(), "PSD1", 4), 0);
  EXPECT_EQ(bytes[24], std::byte{4});
  EXPECT_EQ(bytes[27], std::byte{1});
}

TEST(Header, RejectsEveryFieldThatCannotBe) {
  expect_rejected(with_field(0, std::uint32_t{0x31445351}), "magic");
  expect_rejected(with_field(4, std::uint8_t{1}), "version 1");
  expect_rejected(with_field(4, std::uint8_t{2}), "version 2");
  expect_rejected(with_field(5, std::uint8_t{0}), "kind 0");
  expect_rejected(with_field(5, static_cast<std::uint8_t>(kKinds.size())), "kind " + std::to_string(kKinds.size()));
  expect_rejected(with_field(6, std::uint16_t{kPriorityLevels}), "priority 1024");
  expect_rejected(with_field(6, std::uint16_t{0xffff}), "priority 65535");
  expect_rejected(with_field(8, kMaxPayloadBytes + 1), "payload");
  expect_rejected(with_field(8, ~std::uint64_t{0}), "payload");
}

TEST(Header, RejectsWhatABodyOfItsKindDoesNotHave) {
  for (std::size_t number = 1; number < kKinds.size(); ++number) {
    Header header;
    header.kind = static_cast<Kind>(number);
    const BodyShape& shape = shape_of(header.kind);
    if (shape.has_dtype) header.body[0] = std::byte{1};
    expect_decoded(encoded(header), header);
    const auto expect_bad_byte = [&](std::size_t at, std::uint8_t value, const std::string& word) {
      Header bad = header;
      bad.body[at] = std::byte{value};
      expect_rejected(encoded(bad), word);
    };
    for (const std::uint8_t dtype : {0, 9, 255})
      if (shape.has_dtype || dtype != 0) expect_bad_byte(0, dtype, "dtype");
    for (std::size_t at = 1; at < kBodyBytes; ++at)
      for (unsigned bit = 1; bit < 256; bit *= 2)
        if ((shape.may_have[at] & bit) == 0)
          expect_bad_byte(at, static_cast<std::uint8_t>(bit), at == 1 ? "flags" : "reserved");
  }
}

TEST(Header, TheShapeOfABodyIsWhatItsFieldsTake) {
  using Bits = std::array<std::uint8_t, kBodyBytes>;
  const auto numbers = [](std::uint8_t dtype, std::uint8_t flags, std::uint8_t code, std::size_t bytes) {
    Bits bits{dtype, flags, code, 0};
    std::fill_n(bits.begin() + 4, bytes, std::uint8_t{0xff});
    return bits;
  };
  EXPECT_EQ(shape_of(Kind::hello).may_have, numbers(0, 0, 0xff, 24));
  EXPECT_EQ(shape_of(Kind::push).may_have, numbers(0xff, 0xfd, 0, 24)) << "a push is never dense";
  EXPECT_EQ(shape_of(Kind::factors).may_have, numbers(0xff, 0xff, 0, 24));
  EXPECT_EQ(shape_of(Kind::refuse).may_have, numbers(0, 1, 0xff, 4));
  EXPECT_EQ(shape_of(Kind::goodbye).may_have, Bits());
  EXPECT_EQ(shape_of(Kind::value).may_have, numbers(0xff, 1, 0, 20));
  EXPECT_TRUE(shape_of(Kind::value).has_dtype);
  EXPECT_FALSE(shape_of(Kind::pull).has_dtype);
}

TEST(Header, CarriesEveryPriority) {
  for (std::uint16_t priority = kFirstPriority; priority <= kLastPriority; ++priority) {
    Header header;
    header.priority = priority;
    expect_decoded(encoded(header), header);
  }
  EXPECT_EQ(Header().priority, kFirstPriority);
  Header header;
  header.priority = 0x0201;
  EXPECT_EQ(encoded(header)[6], std::byte{1});
}

TEST(Header, AnyBytesDecodeOrAreRejected) {
  std::mt19937_64 random(11);
  for (int i = 0; i < 20000; ++i) {
    HeaderBytes bytes = encoded(Header{});
    for (int change = 0; change < 3; ++change) bytes[random() % kHeaderBytes] = static_cast<std::byte>(random());
    Header header;
    if (decode(bytes, header).ok()) EXPECT_EQ(encoded(header), bytes);
  }
}

}  // namespace
}  // namespace poseidon::wire
