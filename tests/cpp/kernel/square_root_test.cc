#include "kernel/square_root.h"

#include <gtest/gtest.h>

#include "arrays.h"

namespace poseidon::kernel {
namespace {

std::vector<float> positive_floats(std::size_t count) {
  std::mt19937 random(31);
  std::vector<float> values;
  while (values.size() < count) {
    const float value = std::bit_cast<float>(static_cast<std::uint32_t>(random()) & 0x7fffffffu);
    if (std::isfinite(value)) values.push_back(value);
  }
  return values;
}

TEST(SquareRoot, IsWithinThreeQuartersOfAUnitInTheLastPlace) {
  const std::vector<float> values = positive_floats(100'000);
  for (const Isa isa : available_isas()) {
    std::vector<float> roots(values.size());
    square_root(isa, values.data(), roots.data(), roots.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double exact = std::sqrt(static_cast<double>(values[i]));
      const double unit = std::nextafter(roots[i], std::numeric_limits<float>::infinity()) - roots[i];
      ASSERT_LE(std::abs(roots[i] - exact), 0.7501 * unit) << values[i];
    }
  }
}

TEST(SquareRoot, DependsOnTheValueAlone) {
  const std::vector<float> values = positive_floats(1100);
  std::vector<float> expected(values.size());
  square_root(Isa::baseline, values.data(), expected.data(), expected.size());
  for (const Isa isa : available_isas()) {
    for (const std::size_t n : {1, 2, 3, 4, 5, 17, 511, 512, 513, 1100}) {
      for (const std::size_t begin : {std::size_t{0}, 1100 - n}) {
        std::vector<float> roots(n);
        square_root(isa, values.data() + begin, roots.data(), n);
        for (std::size_t i = 0; i < n; ++i) ASSERT_EQ(roots[i], expected[begin + i]) << n << " from " << begin;
      }
    }
  }
}

TEST(SquareRoot, SpecialValuesAreThoseOfIeee) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const Isa isa : available_isas()) {
    const std::vector<float> given = {0.f, -0.f, infinity, 1e-45f, 4.f, 3.4028235e38f, -1.f, std::nanf("")};
    std::vector<float> values(given.size());
    square_root(isa, given.data(), values.data(), values.size());
    EXPECT_EQ(values[0], 0.f);
    EXPECT_EQ(std::bit_cast<std::uint32_t>(values[1]), 0x80000000u);
    EXPECT_EQ(values[2], infinity);
    EXPECT_EQ(values[3], std::sqrt(1e-45f));
    EXPECT_EQ(values[4], 2.f);
    EXPECT_EQ(values[5], std::sqrt(3.4028235e38f));
    EXPECT_TRUE(std::isnan(values[6]));
    EXPECT_TRUE(std::isnan(values[7]));
  }
}

TEST(SquareRoot, OfDoublesIsCorrectlyRounded) {
  const std::vector<double> given = {0., 2., 3., 1e300, 5e-324, 0.1};
  for (const Isa isa : available_isas()) {
    std::vector<double> values(given.size());
    square_root(isa, given.data(), values.data(), values.size());
    for (std::size_t i = 0; i < values.size(); ++i) EXPECT_EQ(values[i], std::sqrt(given[i]));
  }
}

}  // namespace
}  // namespace poseidon::kernel
