#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "wire/messages/units.h"

namespace poseidon::wire {
namespace {

StoredUnits sample(std::size_t count) {
  StoredUnits units{77, 300, {}};
  for (std::uint32_t i = 0; i < count; ++i)
    units.units.push_back(
        {i * 3, i % 2 == 0 ? DType::float32 : DType::float64, 8 * (i + 1), 8, "layer " + std::to_string(i)});
  return units;
}

TEST(StoredUnits, ComeBackAsTheyWere) {
  for (const std::size_t count : {0u, 1u, 5u, 1000u}) {
    const StoredUnits units = sample(count);
    std::vector<StoredUnit> read;
    for (const TextMessage& message : units.make(0)) {
      EXPECT_EQ(message.header.kind, Kind::units);
      EXPECT_LE(message.header.payload_bytes, kMaxTextBytes);
      EXPECT_EQ(message.header.payload_bytes, message.payload().size());
      const auto part = StoredUnits::read(message.payload());
      ASSERT_TRUE(part.ok()) << part.status().message();
      EXPECT_EQ(part.value().run, 77u);
      EXPECT_EQ(part.value().base_version, 300u);
      read.insert(read.end(), part.value().units.begin(), part.value().units.end());
    }
    EXPECT_EQ(read, units.units);
  }
}

TEST(StoredUnits, ChunksCoverTheUnit) {
  const StoredUnit unit{0, DType::float32, 100, 64, "w"};
  EXPECT_EQ(unit.chunk_count(), 2u);
  EXPECT_EQ(unit.chunk_size(0), 64u);
  EXPECT_EQ(unit.chunk_offset(1), 64u);
  EXPECT_EQ(unit.chunk_size(1), 36u);
  const StoredUnit even{0, DType::float32, 128, 64, "w"};
  EXPECT_EQ(even.chunk_count(), 2u);
  EXPECT_EQ(even.chunk_size(1), 64u);
}

TEST(StoredUnits, WhatIsCutOffIsRejected) {
  const auto message = sample(3).make(0).front();
  const auto whole = message.payload();
  std::size_t accepted = 0;
  for (std::size_t size = 0; size < whole.size(); ++size) {
    const auto read = StoredUnits::read(whole.first(size));
    if (read.ok())
      ++accepted;  // between two units
    else
      EXPECT_EQ(read.status().code(), ErrorCode::mismatch);
  }
  EXPECT_EQ(accepted, 3u);
}

TEST(StoredUnits, NumbersThatMakeNoUnitAreRejected) {
  const StoredUnit good{0, DType::float32, 64, 32, "w"};
  EXPECT_TRUE(check_unit(good).ok());
  const auto rejected = [&](auto change) {
    StoredUnit bad = good;
    change(bad);
    return check_unit(bad).code() == ErrorCode::mismatch;
  };
  EXPECT_TRUE(rejected([](StoredUnit& unit) { unit.dtype = static_cast<DType>(99); }));
  EXPECT_TRUE(rejected([](StoredUnit& unit) { unit.size_bytes = 0; }));
  EXPECT_TRUE(rejected([](StoredUnit& unit) { unit.size_bytes = 63; }));
  EXPECT_TRUE(rejected([](StoredUnit& unit) { unit.chunk_bytes = 0; }));
  EXPECT_TRUE(rejected([](StoredUnit& unit) { unit.chunk_bytes = 30; }));
  EXPECT_TRUE(rejected([](StoredUnit& unit) { unit.chunk_bytes = 128; }));
  EXPECT_TRUE(rejected([](StoredUnit& unit) { unit.size_bytes = std::uint64_t{1} << 62; }));
  EXPECT_TRUE(rejected([](StoredUnit& unit) { unit.name.clear(); }));
  EXPECT_TRUE(rejected([](StoredUnit& unit) { unit.name.assign(kMaxUnitNameBytes + 1, 'x'); }));
}

}  // namespace
}  // namespace poseidon::wire
