#include <gtest/gtest.h>

#include "arrays.h"
#include "kernel/kernel.h"

namespace poseidon::kernel {
namespace {

std::vector<const std::byte*> pointers(const std::vector<Bytes>& arrays) {
  std::vector<const std::byte*> result;
  for (const Bytes& array : arrays) result.push_back(array.data());
  return result;
}

/// Adds in the given order in float32 (float64 for float64), divides, rounds once.
template <typename T>
Bytes naive_sum(const std::vector<Bytes>& arrays, DType dtype, std::size_t element_count, unsigned divisor) {
  Bytes out(element_count * dtype_bytes(dtype));
  for (std::size_t i = 0; i < element_count; ++i) {
    T total = static_cast<T>(value_at(arrays[0].data(), dtype, i));
    for (std::size_t j = 1; j < arrays.size(); ++j) total += static_cast<T>(value_at(arrays[j].data(), dtype, i));
    put(out.data(), dtype, i, total / static_cast<T>(divisor));
  }
  return out;
}

class FloatingSum : public testing::TestWithParam<DType> {};

TEST_P(FloatingSum, EqualsTheNaiveSumBitForBit) {
  const DType dtype = GetParam();
  std::mt19937 random(3);
  for (const std::size_t element_count : {0, 1, 7, 64, 1000, 2048, 4099, 9001}) {
    for (const std::size_t input_count : {1, 2, 3, 4, 5, 7, 8, 17}) {
      std::vector<Bytes> arrays;
      for (std::size_t i = 0; i < input_count; ++i) arrays.push_back(random_array(random, dtype, element_count));
      const unsigned divisor = 1 + static_cast<unsigned>(random() % 9);
      const Bytes expected = dtype == DType::float64 ? naive_sum<double>(arrays, dtype, element_count, divisor)
                                                     : naive_sum<float>(arrays, dtype, element_count, divisor);
      for (const Isa isa : available_isas()) {
        Bytes out(expected.size());
        sum(pointers(arrays), out.data(), element_count, dtype, divisor, isa);
        ASSERT_EQ(out, expected) << element_count << " elements, " << input_count << " inputs, divisor " << divisor;
      }
    }
  }
}

TEST_P(FloatingSum, OutMayBeAnyOfTheInputs) {
  const DType dtype = GetParam();
  constexpr std::size_t element_count = 5003;
  std::mt19937 random(4);
  std::vector<Bytes> arrays;
  for (int i = 0; i < 9; ++i) arrays.push_back(random_array(random, dtype, element_count));
  Bytes expected(arrays[0].size());
  sum(pointers(arrays), expected.data(), element_count, dtype, 9);
  for (std::size_t target = 0; target < arrays.size(); ++target) {
    std::vector<Bytes> copies = arrays;
    sum(pointers(copies), copies[target].data(), element_count, dtype, 9);
    EXPECT_EQ(copies[target], expected) << "into input " << target;
  }
}

TEST_P(FloatingSum, InfinityAndNaNSpread) {
  const DType dtype = GetParam();
  const double infinity = std::numeric_limits<double>::infinity();
  Bytes a(20 * dtype_bytes(dtype));
  Bytes b(a.size());
  put(a.data(), dtype, 0, infinity);
  put(a.data(), dtype, 1, infinity);
  put(b.data(), dtype, 1, -infinity);
  Bytes out(a.size());
  sum(pointers({a, b}), out.data(), 20, dtype, 3);
  EXPECT_EQ(value_at(out.data(), dtype, 0), infinity);
  EXPECT_TRUE(std::isnan(value_at(out.data(), dtype, 1)));
  EXPECT_EQ(value_at(out.data(), dtype, 2), 0);
}

INSTANTIATE_TEST_SUITE_P(DTypes, FloatingSum,
                         testing::Values(DType::float32, DType::float64, DType::float16, DType::bfloat16),
                         [](const auto& info) { return std::string(dtype_name(info.param)); });

TEST(HalfSum, RoundsOnlyOnce) {
  // 2048 + 1 + 1 is 2048 when float16 is rounded after each addition.
  Bytes big(2);
  Bytes one(2);
  put(big.data(), DType::float16, 0, 2048);
  put(one.data(), DType::float16, 0, 1);
  Bytes out(2);
  sum(pointers({big, one, one}), out.data(), 1, DType::float16, 1);
  EXPECT_EQ(value_at(out.data(), DType::float16, 0), 2050);
  // 65504 · 2 / 2 must not pass through infinity.
  put(big.data(), DType::float16, 0, 65504);
  sum(pointers({big, big}), out.data(), 1, DType::float16, 2);
  EXPECT_EQ(value_at(out.data(), DType::float16, 0), 65504);
}

template <typename T>
void expect_integers_wrap(DType dtype) {
  constexpr std::size_t element_count = 10'007;
  std::vector<std::vector<T>> arrays(6, std::vector<T>(element_count));
  std::mt19937_64 random(5);
  std::vector<const std::byte*> inputs;
  for (auto& array : arrays) {
    for (T& value : array) value = static_cast<T>(random());
    inputs.push_back(reinterpret_cast<const std::byte*>(array.data()));
  }
  std::vector<T> expected(element_count);
  for (std::size_t i = 0; i < element_count; ++i) {
    std::uint64_t total = 0;
    for (const auto& array : arrays) total += static_cast<std::uint64_t>(array[i]);
    expected[i] = static_cast<T>(total);
  }
  for (const Isa isa : available_isas()) {
    std::vector<T> out(element_count);
    sum(inputs, reinterpret_cast<std::byte*>(out.data()), element_count, dtype, 1, isa);
    EXPECT_EQ(out, expected);
  }
}

TEST(IntegerSum, Wraps) {
  expect_integers_wrap<std::uint8_t>(DType::uint8);
  expect_integers_wrap<std::int32_t>(DType::int32);
  expect_integers_wrap<std::int64_t>(DType::int64);
}

}  // namespace
}  // namespace poseidon::kernel
