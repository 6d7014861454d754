// Aggregators: the built-in median against a sort of every element, and what may be registered.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cpp/kernel/arrays.h"
#include "kernel/aggregators/aggregate.h"
#include "kernel/aggregators/built_in.h"

namespace poseidon::kernel {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr double kNotANumber = std::numeric_limits<double>::quiet_NaN();

/// The middle of the values, with NaNs behind all numbers, computed as the dtype's contract says.
double reference_median(std::vector<double> values, DType dtype) {
  std::ranges::sort(values, [](double a, double b) { return std::isnan(b) ? !std::isnan(a) : a < b; });
  const double lower = values[(values.size() - 1) / 2];
  const double upper = values[values.size() / 2];
  if (dtype == DType::float64) return (lower + upper) / 2;
  return (static_cast<float>(lower) + static_cast<float>(upper)) / 2;
}

std::vector<const std::byte*> pointers(const std::vector<Bytes>& arrays) {
  std::vector<const std::byte*> all;
  for (const Bytes& array : arrays) all.push_back(array.data());
  return all;
}

TEST(Median, IsTheMiddleOfEveryElement) {
  std::mt19937 random(5);
  const Aggregator& median = *find_aggregator("median");
  for (const DType dtype : {DType::float32, DType::float64, DType::float16, DType::bfloat16}) {
    for (const std::size_t n : {0, 1, 3, 255, 257, 2047, 2049, 5001}) {
      for (std::size_t ranks = 1; ranks <= 9; ++ranks) {
        std::vector<Bytes> inputs;
        for (std::size_t rank = 0; rank < ranks; ++rank) inputs.push_back(random_array(random, dtype, n));
        Bytes out(n * dtype_bytes(dtype), std::byte{0xee});
        aggregate(median, pointers(inputs), out.data(), n, dtype, 1);
        Bytes expected(out.size());
        for (std::size_t i = 0; i < n; ++i) {
          std::vector<double> column;
          for (const Bytes& input : inputs) column.push_back(value_at(input.data(), dtype, i));
          put(expected.data(), dtype, i, reference_median(column, dtype));
        }
        for (std::size_t i = 0; i < n; ++i)
          ASSERT_EQ(value_at(out.data(), dtype, i), value_at(expected.data(), dtype, i))
              << dtype_name(dtype) << ", element " << i << " of " << n << ", " << ranks << " ranks";
      }
    }
  }
}

TEST(Median, HasTheSameBitsOnEveryCpu) {
  std::mt19937 random(6);
  constexpr std::size_t kElements = 777;
  for (const std::size_t ranks : {2, 5, 8}) {
    std::vector<std::vector<float>> inputs(ranks, std::vector<float>(kElements));
    std::vector<std::span<const float>> contributions;
    for (auto& input : inputs) {
      for (float& value : input) value = random() % 9 == 0 ? -0.0F : static_cast<float>(random() % 7) - 3;
      contributions.emplace_back(input);
    }
    std::vector<float> first;
    for (const Isa isa : available_isas()) {
      std::vector<float> result(kElements);
      median().aggregate_float32(isa, {contributions, result});
      if (first.empty()) first = result;
      EXPECT_EQ(std::memcmp(result.data(), first.data(), kElements * sizeof(float)), 0) << ranks;
    }
  }
}

TEST(Median, WithstandsAMinorityOfUselessContributions) {
  const auto median_of = [](const std::vector<double>& values) {
    std::vector<std::span<const double>> contributions;
    for (const double& value : values) contributions.emplace_back(&value, 1);
    double result = 0;
    find_aggregator("median")->aggregate_float64({contributions, {&result, 1}});
    return result;
  };
  EXPECT_EQ(median_of({kNotANumber, 1, 2}), 2);
  EXPECT_EQ(median_of({1, kNotANumber, 2}), 2);
  EXPECT_EQ(median_of({1, 2, kNotANumber}), 2);
  EXPECT_EQ(median_of({kNotANumber, 5, kNotANumber, 4, 6}), 6);
  EXPECT_EQ(median_of({-kInfinite, 7, kInfinite}), 7);
  EXPECT_EQ(median_of({kNotANumber, -kInfinite, 3, 4}), 3.5);
  EXPECT_TRUE(std::isnan(median_of({kNotANumber, 1, kNotANumber})));
  EXPECT_TRUE(std::isnan(median_of({kNotANumber, 1})));
}

TEST(Aggregate, CountsAMissingArrayAsZerosAndDivides) {
  constexpr std::size_t kElements = 2050;
  for (const DType dtype : {DType::float32, DType::float64, DType::float16, DType::bfloat16}) {
    Bytes low(kElements * dtype_bytes(dtype));
    Bytes high(low.size());
    for (std::size_t i = 0; i < kElements; ++i) {
      put(low.data(), dtype, i, -6);
      put(high.data(), dtype, i, static_cast<double>(i % 5) - 2);
    }
    Bytes out(low.size());
    const std::vector<const std::byte*> inputs{low.data(), nullptr, high.data()};
    aggregate(*find_aggregator("median"), inputs, out.data(), kElements, dtype, 4);
    for (std::size_t i = 0; i < kElements; ++i)
      ASSERT_EQ(value_at(out.data(), dtype, i), std::min(static_cast<double>(i % 5) - 2, 0.0) / 4) << i;
  }
}

void expect_invalid(const Status& status, const std::string& word) {
  EXPECT_EQ(status.code(), ErrorCode::invalid_argument) << word;
  EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
}

TEST(Aggregators, HaveANameOfTheirOwnAndBothFunctions) {
  const auto named = [](const std::string& name) {
    return Aggregator{name, [](const AggregateCall<float>&) {}, [](const AggregateCall<double>&) {}};
  };
  expect_invalid(register_aggregator(named("median")), "registered already");
  expect_invalid(register_aggregator(named("sum")), "registered already");
  for (const char* name : {"", "Median", "a b", "a_name_of_25_letters_long_"})
    expect_invalid(register_aggregator(named(name)), "lower-case letters");
  Aggregator half = named("half_of_an_aggregator");
  half.aggregate_float64 = nullptr;
  expect_invalid(register_aggregator(half), "lacks a function");
  EXPECT_EQ(find_aggregator("half_of_an_aggregator"), nullptr);
  EXPECT_EQ(find_aggregator("sum"), nullptr) << "servers make it without a function";
  ASSERT_TRUE(register_aggregator(named("listed")).ok());
  const auto names = aggregator_names();
  ASSERT_GE(names.size(), 3u);
  EXPECT_EQ(names[0], "sum");
  EXPECT_EQ(names[1], "median");
  EXPECT_NE(std::ranges::find(names, "listed"), names.end());
}

}  // namespace
}  // namespace poseidon::kernel
