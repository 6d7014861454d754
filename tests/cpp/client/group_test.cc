// Group: its members, their sum, and the members of the result.
#include "client/group.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "cpp/kernel/arrays.h"
#include "kernel/kernel.h"

namespace poseidon {
namespace {

/// Members of 3, 0 and 2 elements.
Unit unit_of(DType dtype) {
  Unit unit;
  unit.dtype = dtype;
  unit.layers = {0, 1, 2};
  unit.offsets_bytes = {0, 3 * dtype_bytes(dtype), 3 * dtype_bytes(dtype)};
  unit.size_bytes = (3 + 0 + 2 + 3) * dtype_bytes(dtype);
  return unit;
}

kernel::Bytes array_of(DType dtype, const std::vector<double>& values) {
  kernel::Bytes array(values.size() * dtype_bytes(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) kernel::put(array.data(), dtype, i, values[i]);
  return array;
}

/// The bytes that are sent.
kernel::Bytes sent(const Group& group) {
  kernel::Bytes bytes;
  for (const auto& piece : group.pieces()) bytes.insert(bytes.end(), piece.begin(), piece.end());
  return bytes;
}

class GroupTest : public ::testing::TestWithParam<DType> {};

TEST_P(GroupTest, TakesMembersAndKnowsWhoContributed) {
  const DType dtype = GetParam();
  const Unit unit = unit_of(dtype);
  Group mine(unit);
  Group theirs(unit);
  const auto first = array_of(dtype, {1, 2, 3});
  const auto third = array_of(dtype, {8, 9});
  // Runs twice, because the state of a step must not reach the next one.
  for (int step = 0; step < 2; ++step) {
    EXPECT_FALSE(mine.put(2, third, true, 2));
    EXPECT_FALSE(mine.put(0, first, true, 2));
    EXPECT_TRUE(mine.put(1, {}, true, 2));
    EXPECT_FALSE(theirs.put(0, first, false, 2));
    EXPECT_FALSE(theirs.put(1, {}, false, 2));
    EXPECT_TRUE(theirs.put(2, third, true, 2));
    const kernel::Bytes ours = sent(mine);
    const kernel::Bytes others = sent(theirs);
    ASSERT_EQ(ours.size(), unit.size_bytes);
    ASSERT_EQ(others.size(), unit.size_bytes);
    kernel::Bytes sum(unit.size_bytes);
    const std::vector<const std::byte*> inputs{ours.data(), others.data()};
    kernel::sum(inputs, sum.data(), sum.size() / dtype_bytes(dtype), dtype, 2);
    EXPECT_TRUE(mine.present(sum, 0));
    EXPECT_TRUE(mine.present(sum, 1));
    EXPECT_FALSE(mine.present(sum, 2));
    kernel::Bytes result(first.size());
    mine.take(sum, 0, result);
    EXPECT_EQ(result, array_of(dtype, {0.5, 1, 1.5}));
    mine.reset();
    theirs.reset();
  }
}

TEST_P(GroupTest, OneDivisorForAllMembersOfAStep) {
  const Unit unit = unit_of(GetParam());
  Group group(unit);
  EXPECT_TRUE(group.takes(4));
  group.put(1, {}, true, 4);
  EXPECT_TRUE(group.takes(4));
  EXPECT_FALSE(group.takes(3));
  group.reset();
  EXPECT_TRUE(group.takes(3));
}

INSTANTIATE_TEST_SUITE_P(DTypes, GroupTest,
                         ::testing::Values(DType::float32, DType::float64, DType::float16, DType::bfloat16));

}  // namespace
}  // namespace poseidon
