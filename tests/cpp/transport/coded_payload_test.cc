#include "transport/coded_payload.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace poseidon {
namespace {

using Bytes = std::vector<std::byte>;

Bytes floats(std::size_t count) {
  Bytes bytes(count * sizeof(float));
  for (std::size_t i = 0; i < count; ++i) {
    const float value = 1.0F + static_cast<float>(i % 97) / 100;
    std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value);
  }
  return bytes;
}

/// All segments, one after the other.
Bytes coded(std::vector<std::span<const std::byte>> pieces) {
  CodedPayload payload(Coding::float32, std::move(pieces));
  Bytes all;
  Bytes room(kSegmentRoomBytes);
  while (!payload.empty()) {
    const auto segment = payload.next(room);
    all.insert(all.end(), segment.begin(), segment.end());
  }
  return all;
}

TEST(CodedPayload, ComesBackFromPiecesOfAnySize) {
  const Bytes values = floats(3 * kSegmentBytes / sizeof(float) + 77);
  const std::span<const std::byte> all = values;
  const Bytes wire = coded({all.first(6), {}, all.subspan(6, 40'001), all.subspan(40'007)});
  EXPECT_EQ(wire, coded({all}));
  EXPECT_LT(wire.size(), values.size() * 9 / 10);
  Bytes back(values.size());
  std::span<const std::byte> rest = wire;
  for (std::size_t done = 0; done < back.size();) {
    const std::size_t plain_bytes = std::min(kSegmentBytes, back.size() - done);
    const auto size = segment_bytes(rest, plain_bytes);
    ASSERT_TRUE(size.ok() && size.value());
    ASSERT_TRUE(
        decode_segment(Coding::float32, rest.first(*size.value()), std::span(back).subspan(done, plain_bytes)).ok());
    rest = rest.subspan(*size.value());
    done += plain_bytes;
  }
  EXPECT_TRUE(rest.empty());
  EXPECT_EQ(back, values);
}

TEST(CodedPayload, ASegmentSaysHowLongItIsBeforeAnythingIsKeptForIt) {
  Bytes head(kSegmentHeadBytes);
  EXPECT_FALSE(segment_bytes(std::span(head).first(3), 1024).value()) << "its head is not there";
  EXPECT_EQ(segment_bytes(head, 1024).status().code(), ErrorCode::mismatch) << "of no bytes";
  const std::uint32_t more = 1025;
  std::memcpy(head.data(), &more, sizeof more);
  EXPECT_EQ(segment_bytes(head, 1024).status().code(), ErrorCode::mismatch) << "more than the values as they are";
  EXPECT_EQ(segment_bytes(head, 1028).value(), kSegmentHeadBytes + 1025);
}

TEST(CodedPayload, ASegmentThatStandsForOtherValuesIsAnError) {
  const Bytes values = floats(1024);
  const Bytes wire = coded({values});
  Bytes back(values.size() + 1024);
  const auto decode = [&](std::span<const std::byte> segment, std::size_t plain_bytes) {
    return decode_segment(Coding::float32, segment, std::span(back).first(plain_bytes)).code();
  };
  ASSERT_EQ(decode(wire, values.size()), ErrorCode::ok);
  EXPECT_EQ(decode(std::span(wire).first(wire.size() - 1), values.size()), ErrorCode::mismatch) << "it is cut";
  EXPECT_EQ(decode(wire, values.size() - 1024), ErrorCode::mismatch) << "it has a block more";
  EXPECT_EQ(decode(wire, values.size() + 1024), ErrorCode::mismatch) << "it has a block less";
}

}  // namespace
}  // namespace poseidon
