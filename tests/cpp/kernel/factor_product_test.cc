#include <gtest/gtest.h>

#include <cmath>

#include "arrays.h"
#include "kernel/kernel.h"

namespace poseidon::kernel {
namespace {

/// Terms and the memory behind them.
struct Terms {
  std::vector<FactorTerm> terms;
  std::vector<Bytes> memory;
};

void add_factors(Terms& terms, std::mt19937& random, DType dtype, std::size_t rows, std::size_t cols,
                 std::size_t count) {
  terms.memory.push_back(random_array(random, dtype, count * rows));
  terms.memory.push_back(random_array(random, dtype, count * cols));
  FactorTerm term;
  term.dtype = dtype;
  term.left = terms.memory[terms.memory.size() - 2].data();
  term.right = terms.memory.back().data();
  term.count = count;
  terms.terms.push_back(term);
}

void add_dense(Terms& terms, std::mt19937& random, DType dtype, std::size_t rows, std::size_t cols) {
  terms.memory.push_back(random_array(random, dtype, rows * cols));
  FactorTerm term;
  term.dtype = dtype;
  term.dense = terms.memory.back().data();
  terms.terms.push_back(term);
}

/// Element (row, col) as kernel.h defines it.
template <typename T>
double naive_element(const Terms& terms, const Bytes& held, DType dtype, std::size_t rows, std::size_t cols,
                     std::size_t row, std::size_t col, unsigned divisor, bool accumulate) {
  T chain = 0;
  for (const FactorTerm& term : terms.terms) {
    if (term.dense != nullptr) chain += static_cast<T>(value_at(term.dense, dtype, row * cols + col));
    for (std::size_t k = 0; term.dense == nullptr && k < term.count; ++k) {
      chain = std::fma(static_cast<T>(value_at(term.left, term.dtype, k * rows + row)),
                       static_cast<T>(value_at(term.right, term.dtype, k * cols + col)), chain);
    }
  }
  chain /= static_cast<T>(divisor);
  if (accumulate) chain = static_cast<T>(value_at(held.data(), dtype, row * cols + col)) + chain;
  return chain;
}

void expect_equals_naive(const Terms& terms, DType dtype, std::size_t rows, std::size_t cols, unsigned divisor,
                         bool accumulate) {
  std::mt19937 random(6);
  const Bytes held = random_array(random, dtype, rows * cols);
  Bytes expected(held.size());
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t col = 0; col < cols; ++col) {
      const auto naive = dtype == DType::float64 ? naive_element<double> : naive_element<float>;
      put(expected.data(), dtype, row * cols + col,
          naive(terms, held, dtype, rows, cols, row, col, divisor, accumulate));
    }
  }
  for (const Isa isa : available_isas()) {
    Bytes out = held;
    factor_product(terms.terms, out.data(), dtype, rows, cols, 0, rows, divisor, accumulate, isa);
    ASSERT_EQ(out, expected) << rows << " x " << cols << ", divisor " << divisor << ", isa " << static_cast<int>(isa);
    Bytes split = held;
    for (std::size_t row = 0, step = 1; row < rows; row += step, step = step * 2 + 1) {
      factor_product(terms.terms, split.data(), dtype, rows, cols, row, std::min(rows, row + step), divisor, accumulate,
                     isa);
    }
    ASSERT_EQ(split, expected) << "split into row ranges";
  }
}

class FactorProduct : public testing::TestWithParam<DType> {};

TEST_P(FactorProduct, EqualsTheNaiveChainBitForBit) {
  std::mt19937 random(7);
  const std::size_t sizes[][2] = {{1, 1}, {3, 5}, {8, 48}, {9, 49}, {17, 400}, {131, 23}, {2, 801}, {140, 97}};
  for (const auto& [rows, cols] : sizes) {
    Terms terms;
    for (const std::size_t count : {3, 0, 1, 16}) add_factors(terms, random, GetParam(), rows, cols, count);
    expect_equals_naive(terms, GetParam(), rows, cols, 4, false);
    expect_equals_naive(terms, GetParam(), rows, cols, 3, true);
  }
}

TEST_P(FactorProduct, LongChainsCrossTheBlocks) {
  std::mt19937 random(8);
  Terms terms;
  for (const std::size_t count : {100, 129, 256, 5}) add_factors(terms, random, GetParam(), 13, 51, count);
  expect_equals_naive(terms, GetParam(), 13, 51, 1, false);
}

TEST_P(FactorProduct, DenseTermsKeepTheirPlace) {
  std::mt19937 random(9);
  Terms terms;
  add_factors(terms, random, GetParam(), 10, 61, 6);
  add_dense(terms, random, GetParam(), 10, 61);
  add_factors(terms, random, GetParam(), 10, 61, 130);
  add_dense(terms, random, GetParam(), 10, 61);
  add_dense(terms, random, GetParam(), 10, 61);
  expect_equals_naive(terms, GetParam(), 10, 61, 5, true);
}

TEST_P(FactorProduct, NoTermsGiveZero) {
  expect_equals_naive({}, GetParam(), 5, 7, 2, false);
  expect_equals_naive({}, GetParam(), 5, 7, 2, true);
  Bytes nothing;
  factor_product({}, nothing.data(), GetParam(), 0, 7, 0, 0, 1, false);
  factor_product({}, nothing.data(), GetParam(), 7, 0, 0, 7, 1, false);
}

TEST_P(FactorProduct, TouchesOnlyItsRows) {
  std::mt19937 random(10);
  Terms terms;
  add_factors(terms, random, GetParam(), 20, 33, 4);
  const Bytes held = random_array(random, GetParam(), 20 * 33);
  Bytes out = held;
  factor_product(terms.terms, out.data(), GetParam(), 20, 33, 5, 11, 1, false);
  const std::size_t row_bytes = 33 * dtype_bytes(GetParam());
  EXPECT_TRUE(std::equal(out.begin(), out.begin() + static_cast<std::ptrdiff_t>(5 * row_bytes), held.begin()));
  EXPECT_TRUE(std::equal(out.begin() + static_cast<std::ptrdiff_t>(11 * row_bytes), out.end(),
                         held.begin() + static_cast<std::ptrdiff_t>(11 * row_bytes)));
  EXPECT_NE(out, held);
}

INSTANTIATE_TEST_SUITE_P(DTypes, FactorProduct,
                         testing::Values(DType::float32, DType::float64, DType::float16, DType::bfloat16),
                         [](const auto& info) { return std::string(dtype_name(info.param)); });

TEST(FactorProductMixed, NarrowerFactorsAreExactInTheWiderResult) {
  std::mt19937 random(11);
  Terms terms;
  for (const DType dtype : {DType::float16, DType::bfloat16, DType::float32}) {
    add_factors(terms, random, dtype, 12, 203, 7);
  }
  expect_equals_naive(terms, DType::float32, 12, 203, 3, false);
  expect_equals_naive(terms, DType::float64, 12, 203, 3, true);
}

TEST(FactorProductMixed, FactorsNeedNotBeAligned) {
  std::mt19937 random(12);
  Terms terms;
  add_factors(terms, random, DType::float32, 9, 50, 5);
  Bytes shifted(terms.memory[0].size() + 1);
  std::copy(terms.memory[0].begin(), terms.memory[0].end(), shifted.begin() + 1);
  terms.terms[0].left = shifted.data() + 1;
  expect_equals_naive(terms, DType::float32, 9, 50, 1, false);
}

}  // namespace
}  // namespace poseidon::kernel
