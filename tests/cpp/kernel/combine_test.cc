// The reductions of collectives, against loops over single elements, with every instruction set.
#include "kernel/combine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "cpp/kernel/arrays.h"
#include "kernel/kernel.h"

namespace poseidon::kernel {
namespace {

constexpr ReduceOp kOps[] = {ReduceOp::sum,  ReduceOp::product, ReduceOp::min, ReduceOp::max,
                             ReduceOp::band, ReduceOp::bor,     ReduceOp::bxor};

template <typename T>
T slowly(ReduceOp op, T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    const auto x = static_cast<U>(a), y = static_cast<U>(b);
    if (op == ReduceOp::band) return static_cast<T>(x & y);
    if (op == ReduceOp::bor) return static_cast<T>(x | y);
    if (op == ReduceOp::bxor) return static_cast<T>(x ^ y);
    if (op == ReduceOp::sum) return static_cast<T>(static_cast<U>(x + y));
    if (op == ReduceOp::product) return static_cast<T>(static_cast<U>(std::uint64_t{x} * y));
  } else {
    if (op == ReduceOp::sum) return a + b;
    if (op == ReduceOp::product) return a * b;
  }
  return op == ReduceOp::min ? std::min(a, b) : std::max(a, b);
}

template <typename T>
std::vector<std::vector<T>> arrays(std::size_t how_many, std::size_t count) {
  std::mt19937_64 random(count);
  std::vector<std::vector<T>> all(how_many, std::vector<T>(count));
  for (auto& array : all)
    for (T& value : array) {
      if constexpr (std::is_integral_v<T>)
        value = static_cast<T>(random());
      else
        value = static_cast<T>(static_cast<double>(random() % 2000) / 100 - 10);
    }
  return all;
}

template <typename T>
void expect_all(Element element) {
  for (const ReduceOp op : kOps) {
    if (!check_reduction(op, element, 1).ok()) continue;
    for (const std::size_t count : {0u, 1u, 31u, 1024u, 3333u}) {
      for (const std::size_t how_many : {1u, 2u, 5u}) {
        const auto given = arrays<T>(how_many, count);
        std::vector<T> expected = given[0];
        for (std::size_t i = 1; i < how_many; ++i)
          for (std::size_t j = 0; j < count; ++j) expected[j] = slowly(op, expected[j], given[i][j]);
        for (const Isa isa : available_isas()) {
          for (std::size_t place = 0; place <= how_many; ++place) {  // the result in one of the inputs, or elsewhere
            auto copies = given;
            copies.emplace_back(count);
            std::vector<const std::byte*> inputs;
            for (std::size_t i = 0; i < how_many; ++i)
              inputs.push_back(reinterpret_cast<const std::byte*>(copies[i].data()));
            combine(op, element, inputs, reinterpret_cast<std::byte*>(copies[place].data()), count, 1, isa);
            ASSERT_EQ(copies[place], expected) << reduce_op_name(op) << " of " << element_name(element);
          }
        }
      }
    }
  }
}

TEST(Combine, IsTheSameElementByElement) {
  expect_all<float>(Element::float32);
  expect_all<double>(Element::float64);
  expect_all<std::int8_t>(Element::int8);
  expect_all<std::uint8_t>(Element::uint8);
  expect_all<std::int16_t>(Element::int16);
  expect_all<std::int32_t>(Element::int32);
  expect_all<std::int64_t>(Element::int64);
}

TEST(Combine, HalvesAreRoundedOnce) {
  for (const auto [element, dtype] :
       {std::pair(Element::float16, DType::float16), std::pair(Element::bfloat16, DType::bfloat16)}) {
    const auto wide = arrays<float>(3, 1500);
    std::vector<std::vector<std::byte>> halves;
    std::vector<const std::byte*> inputs;
    std::vector<std::vector<float>> exact(3, std::vector<float>(1500));
    for (std::size_t i = 0; i < 3; ++i) {
      halves.emplace_back(3000);
      encode(dtype, wide[i].data(), halves[i].data(), 1500);
      decode(dtype, halves[i].data(), exact[i].data(), 1500);
    }
    for (const auto& half : halves) inputs.push_back(half.data());
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::product, ReduceOp::min, ReduceOp::max}) {
      std::vector<float> result(1500);
      std::vector<std::byte> expected(3000), out(3000);
      for (std::size_t j = 0; j < 1500; ++j) result[j] = slowly(op, slowly(op, exact[0][j], exact[1][j]), exact[2][j]);
      encode(dtype, result.data(), expected.data(), 1500);
      for (const Isa isa : available_isas()) {
        combine(op, element, inputs, out.data(), 1500, 1, isa);
        EXPECT_EQ(out, expected) << reduce_op_name(op) << " of " << element_name(element);
      }
    }
  }
}

TEST(Combine, AnExtremeOfANaNIsANaN) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float first[] = {nan, 1, 2}, second[] = {1, nan, 3};
  const std::byte* const inputs[] = {reinterpret_cast<const std::byte*>(first),
                                     reinterpret_cast<const std::byte*>(second)};
  for (const ReduceOp op : {ReduceOp::min, ReduceOp::max}) {
    float out[3];
    combine(op, Element::float32, inputs, reinterpret_cast<std::byte*>(out), 3, 1);
    EXPECT_TRUE(std::isnan(out[0]));
    EXPECT_TRUE(std::isnan(out[1]));
    EXPECT_EQ(out[2], op == ReduceOp::min ? 2 : 3);
  }
}

TEST(Combine, ReductionsThatAreNotDefinedAreRefused) {
  EXPECT_FALSE(check_reduction(ReduceOp::bxor, Element::float16, 1).ok());
  EXPECT_FALSE(check_reduction(ReduceOp::sum, Element::int32, 2).ok());
  EXPECT_FALSE(check_reduction(ReduceOp::max, Element::float32, 2).ok());
  EXPECT_FALSE(check_reduction(ReduceOp::sum, Element::float32, 0).ok());
  EXPECT_TRUE(check_reduction(ReduceOp::sum, Element::bfloat16, 3).ok());
  EXPECT_TRUE(check_reduction(ReduceOp::bor, Element::int8, 1).ok());
}

}  // namespace
}  // namespace poseidon::kernel
