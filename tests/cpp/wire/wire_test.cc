// The wire format: what goes in comes out, and what does not belong is rejected by name.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <random>
#include <string>

#include "wire/header.h"
#include "wire/messages.h"

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
    header.kind = static_cast<Kind>(1 + random() % 7);
    header.dtype = static_cast<DType>(1 + random() % 7);
    header.flags = static_cast<std::uint8_t>(random() % 8);
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
    const Bytes bytes = encoded(header);
    const auto decoded = decode(bytes);
    ASSERT_TRUE(decoded.ok());
    EXPECT_EQ(encoded(decoded.value()), bytes);
    EXPECT_EQ(decoded.value().step, header.step);
    EXPECT_EQ(decoded.value().cols, header.cols);
    EXPECT_EQ(decoded.value().payload_bytes, header.payload_bytes);
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
  expect_rejected(with_field(4, std::uint8_t{2}), "version 2");
  expect_rejected(with_field(5, std::uint8_t{0}), "kind 0");
  expect_rejected(with_field(5, std::uint8_t{8}), "kind 8");
  expect_rejected(with_field(6, std::uint8_t{0}), "dtype");
  expect_rejected(with_field(6, std::uint8_t{8}), "dtype");
  expect_rejected(with_field(7, std::uint8_t{8}), "flags");
  expect_rejected(with_field(7, std::uint8_t{0x80}), "flags");
  expect_rejected(with_field(48, kMaxPayloadBytes + 1), "payload");
  expect_rejected(with_field(48, ~std::uint64_t{0}), "payload");
  expect_rejected(with_field(56, std::uint8_t{1}), "reserved");
  expect_rejected(with_field(63, std::uint8_t{1}), "reserved");
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

TEST(Messages, HelloRoundTrip) {
  const TextMessage message = make_hello({3, 8, "a job"});
  EXPECT_EQ(message.header.payload_bytes, 5u);
  const Hello hello = read_hello(message.header, message.payload());
  EXPECT_EQ(hello.rank, 3u);
  EXPECT_EQ(hello.worker_count, 8u);
  EXPECT_EQ(hello.job, "a job");
  EXPECT_EQ(read_hello(make_hello({0, 1, ""}).header, {}).job, "");
}

TEST(Messages, ErrorRoundTrip) {
  Header about;
  about.unit = 4;
  about.chunk = 5;
  about.step = 6;
  const TextMessage message = make_error(Kind::refuse, about, {ErrorCode::timeout, "too late"});
  EXPECT_EQ(message.header.kind, Kind::refuse);
  EXPECT_EQ(message.header.unit, 4u);
  EXPECT_EQ(message.header.chunk, 5u);
  EXPECT_EQ(message.header.step, 6u);
  const Status status = read_error(message.header, message.payload());
  EXPECT_EQ(status.code(), ErrorCode::timeout);
  EXPECT_EQ(status.message(), "too late");
}

TEST(Messages, UnknownErrorCodesBecomeAborted) {
  Header header;
  for (const std::uint32_t code : {0u, 9u, 0xffffffffu}) {
    header.divisor = code;
    EXPECT_EQ(read_error(header, {}).code(), ErrorCode::aborted);
  }
}

TEST(Messages, LongTextsAreCut) {
  const std::string text(kMaxTextBytes + 1, 'x');
  EXPECT_EQ(make_hello({0, 1, text}).payload().size(), kMaxTextBytes);
  const TextMessage message = make_error(Kind::abort, Header{}, {ErrorCode::aborted, text});
  EXPECT_EQ(message.payload().size(), kMaxTextBytes);
  EXPECT_EQ(message.header.payload_bytes, kMaxTextBytes);
  EXPECT_EQ(make_hello({0, 1, std::string(kMaxTextBytes, 'x')}).payload().size(), kMaxTextBytes);
}

}  // namespace
}  // namespace poseidon::wire
