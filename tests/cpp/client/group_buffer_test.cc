// GroupBuffer: members in, sum, members out.
#include "client/group_buffer.h"

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

class GroupBufferTest : public ::testing::TestWithParam<DType> {};

TEST_P(GroupBufferTest, TakesMembersAndKnowsWhoContributed) {
  const DType dtype = GetParam();
  const Unit unit = unit_of(dtype);
  GroupBuffer mine(unit);
  GroupBuffer theirs(unit);
  const auto first = array_of(dtype, {1, 2, 3});
  const auto third = array_of(dtype, {8, 9});
  // Twice: what a step leaves behind must not reach the next one.
  for (int step = 0; step < 2; ++step) {
    EXPECT_FALSE(mine.put(2, third, true, 2));
    EXPECT_FALSE(mine.put(0, first, false, 2));
    EXPECT_TRUE(mine.put(1, {}, true, 2));
    EXPECT_FALSE(theirs.put(0, first, false, 2));
    EXPECT_FALSE(theirs.put(1, {}, false, 2));
    EXPECT_TRUE(theirs.put(2, third, true, 2));
    const std::vector<const std::byte*> inputs{mine.span().data(), theirs.span().data()};
    kernel::sum(inputs, mine.span().data(), mine.span().size() / dtype_bytes(dtype), dtype, 2);
    EXPECT_TRUE(mine.present(0));
    EXPECT_TRUE(mine.present(1));
    EXPECT_FALSE(mine.present(2));
    kernel::Bytes result(first.size());
    mine.take(0, result);
    EXPECT_EQ(result, first);
    mine.reset();
    theirs.reset();
  }
}

TEST_P(GroupBufferTest, OneDivisorForAllMembersOfAStep) {
  const Unit unit = unit_of(GetParam());
  GroupBuffer group(unit);
  EXPECT_TRUE(group.takes(4));
  group.put(1, {}, true, 4);
  EXPECT_TRUE(group.takes(4));
  EXPECT_FALSE(group.takes(3));
  group.reset();
  EXPECT_TRUE(group.takes(3));
}

INSTANTIATE_TEST_SUITE_P(DTypes, GroupBufferTest,
                         ::testing::Values(DType::float32, DType::float64, DType::float16, DType::bfloat16));

}  // namespace
}  // namespace poseidon
