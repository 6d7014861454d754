// sum_rows: the bits of each row's sum are those of `sum` over the terms that have the row.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <vector>

#include "cpp/kernel/arrays.h"
#include "kernel/kernel.h"

namespace poseidon::kernel {
namespace {

constexpr std::size_t kRows = 40;
constexpr std::size_t kCols = 7;
constexpr unsigned kDivisor = 3;

/// One term in memory of its own. A dense one has no indexes.
struct Given {
  std::vector<std::uint32_t> indexes;
  std::vector<std::byte> values;
  bool dense = false;

  std::size_t count() const { return dense ? kRows : indexes.size(); }
  RowTerm term() const { return {dense ? nullptr : indexes.data(), values.data(), count()}; }
};

class RowSum : public ::testing::TestWithParam<DType> {
 protected:
  std::size_t row_bytes() const { return kCols * dtype_bytes(GetParam()); }

  Given random_term(bool dense) {
    Given given;
    given.dense = dense;
    for (std::uint32_t row = 0; row < kRows; ++row)
      if (!dense && random_() % 3 == 0) given.indexes.push_back(row);
    given.values.resize(given.count() * row_bytes());
    std::uniform_real_distribution<double> real(-1, 1);
    for (std::size_t i = 0; i < given.count() * kCols; ++i) put(given.values.data(), GetParam(), i, real(random_));
    return given;
  }

  /// Each row by the kernel for whole arrays.
  std::map<std::uint32_t, std::vector<std::byte>> expected(const std::vector<Given>& all) const {
    std::map<std::uint32_t, std::vector<const std::byte*>> inputs;
    for (const Given& one : all)
      for (std::size_t i = 0; i < one.count(); ++i)
        inputs[one.dense ? static_cast<std::uint32_t>(i) : one.indexes[i]].push_back(one.values.data() +
                                                                                     i * row_bytes());
    std::map<std::uint32_t, std::vector<std::byte>> rows;
    for (const auto& [row, parts] : inputs) {
      rows[row].resize(row_bytes());
      sum(parts, rows[row].data(), kCols, GetParam(), kDivisor);
    }
    return rows;
  }

  void check(const std::vector<Given>& all) {
    std::vector<RowTerm> terms;
    for (const Given& one : all) terms.push_back(one.term());
    const auto rows = expected(all);
    std::vector<std::uint32_t> indexes(kRows);
    std::vector<std::byte> packed(kRows * row_bytes());
    const std::size_t count = sum_rows(terms, GetParam(), GetParam(), kCols, kDivisor, indexes.data(), packed.data());
    ASSERT_EQ(count, rows.size());
    std::vector<std::byte> spread(kRows * row_bytes(), std::byte{9});
    EXPECT_EQ(sum_rows(terms, GetParam(), GetParam(), kCols, kDivisor, nullptr, spread.data()), count);
    std::size_t at = 0;
    for (const auto& [row, values] : rows) {
      EXPECT_EQ(indexes[at], row);
      EXPECT_EQ(std::memcmp(packed.data() + at * row_bytes(), values.data(), row_bytes()), 0) << row;
      EXPECT_EQ(std::memcmp(spread.data() + row * row_bytes(), values.data(), row_bytes()), 0) << row;
      ++at;
    }
    for (std::uint32_t row = 0; row < kRows; ++row)
      if (!rows.contains(row)) EXPECT_EQ(spread[row * row_bytes()], std::byte{9}) << "row " << row << " was touched";
  }

  std::mt19937 random_{3};
};

TEST_P(RowSum, HasTheBitsOfTheSumOfEachRow) {
  for (int i = 0; i < 20; ++i) check({random_term(false), random_term(false), random_term(false)});
}

TEST_P(RowSum, TakesDenseAndEmptyTerms) {
  check({random_term(false), random_term(true), Given{}});
  check({random_term(true), random_term(true)});
  check({Given{}});
}

INSTANTIATE_TEST_SUITE_P(Kernel, RowSum,
                         ::testing::Values(DType::float32, DType::float64, DType::float16, DType::bfloat16));

TEST(RowSumInFloat32, KeepsSumsOfNarrowRowsInFloat32) {
  std::vector<std::byte> narrow(2 * dtype_bytes(DType::bfloat16));
  put(narrow.data(), DType::bfloat16, 0, 1);
  put(narrow.data(), DType::bfloat16, 1, 1 + 1.0 / 128);
  const std::vector<std::uint32_t> both{4};
  const std::vector<RowTerm> terms{{both.data(), narrow.data(), 1}, {both.data(), narrow.data() + 2, 1}};
  std::uint32_t index = 0;
  float mean = 0;
  EXPECT_EQ(sum_rows(terms, DType::bfloat16, DType::float32, 1, 2, &index, reinterpret_cast<std::byte*>(&mean)), 1u);
  EXPECT_EQ(mean, 1 + 1.0f / 256);
  EXPECT_EQ(index, 4u);
}

}  // namespace
}  // namespace poseidon::kernel
