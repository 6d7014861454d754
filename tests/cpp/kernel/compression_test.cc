// Lossy compression against slow computations, on every instruction set that this CPU has.
#include "kernel/compression.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "cpp/kernel/arrays.h"

namespace poseidon::kernel {
namespace {

using Floats = std::vector<float>;
using Indexes = std::vector<std::uint32_t>;

struct Taken {
  Indexes indexes;
  Floats values;
  Floats residual;
};

bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// By sorting: the larger magnitude first, then the lower index.
Taken slowly_taken(const Floats& gradient, const Floats& residual, std::size_t count) {
  Floats sums(gradient.size());
  for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = gradient[i] + residual[i];
  const auto size_of = [&](std::uint32_t i) {
    return std::isnan(sums[i]) ? std::pair(1, 0.0F) : std::pair(0, std::fabs(sums[i]));
  };
  Taken taken;
  taken.indexes.resize(sums.size());
  std::iota(taken.indexes.begin(), taken.indexes.end(), 0u);
  std::ranges::stable_sort(taken.indexes, [&](auto a, auto b) { return size_of(a) > size_of(b); });
  taken.indexes.resize(count);
  std::ranges::sort(taken.indexes);
  const bool finite = std::ranges::all_of(sums, [](float sum) { return std::isfinite(sum); });
  taken.residual = finite ? sums : residual;
  for (const std::uint32_t i : taken.indexes) {
    taken.values.push_back(sums[i]);
    if (finite) taken.residual[i] = 0;
  }
  return taken;
}

void expect_taken(const Floats& gradient, const Floats& residual, std::size_t count) {
  const Taken expected = slowly_taken(gradient, residual, count);
  for (const Isa isa : available_isas()) {
    Taken got{Indexes(count), Floats(count), residual};
    take_largest(gradient.data(), got.residual.data(), gradient.size(), got.indexes, got.values.data(), isa);
    EXPECT_EQ(got.indexes, expected.indexes) << gradient.size() << " elements";
    EXPECT_TRUE(same_bits(got.values, expected.values));
    EXPECT_TRUE(same_bits(got.residual, expected.residual));
  }
}

Floats random_floats(std::mt19937& random, std::size_t count) {
  std::normal_distribution<float> values;
  Floats floats(count);
  for (float& value : floats) value = values(random);
  return floats;
}

TEST(TakeLargest, IsWhatSortingTakes) {
  std::mt19937 random(1);
  for (const std::size_t size : {1u, 2u, 15u, 16u, 17u, 1000u, 40'000u, 100'003u})
    for (const std::size_t part : {1000u, 100u, 3u, 1u})
      expect_taken(random_floats(random, size), random_floats(random, size), std::max<std::size_t>(1, size / part));
}

TEST(TakeLargest, TakesTheFirstOfEqualMagnitudes) {
  std::mt19937 random(2);
  for (const std::size_t size : {50u, 20'000u, 70'001u}) {
    Floats few(size);
    for (float& value : few) value = static_cast<float>(random() % 5) - 2;
    const Floats zeros(size);
    for (const std::size_t count : {size / 100 + 1, size / 3, size}) {
      expect_taken(few, zeros, count);
      expect_taken(zeros, zeros, count);
      expect_taken(Floats(size, -0.5F), zeros, count);
    }
    Floats one = zeros;
    one[size - 1] = 1e-40F;  // subnormal
    expect_taken(one, zeros, 3);
  }
}

TEST(TakeLargest, LeavesTheResidualAloneIfSomethingIsNotFinite) {
  std::mt19937 random(3);
  for (const float bad : {kInfinity, -kInfinity, kNan}) {
    Floats gradient = random_floats(random, 5000);
    gradient[4321] = bad;
    expect_taken(gradient, random_floats(random, 5000), 50);
    gradient[3] = kNan;
    expect_taken(gradient, random_floats(random, 5000), 1);
  }
  expect_taken(Floats(100, 3e38F), Floats(100, 3e38F), 7);  // the sums overflow
}

TEST(SumSparse, AddsTermAfterTermAndDividesOnce) {
  std::mt19937 random(4);
  const std::size_t size = 20'000;
  std::vector<Indexes> indexes(3);
  std::vector<Floats> values;
  for (Indexes& one : indexes) {
    for (std::uint32_t i = 0; i < size; ++i)
      if (random() % 50 == 0 || i % 1000 == 7) one.push_back(i);
    values.push_back(random_floats(random, one.size()));
  }
  std::vector<RowTerm> terms;
  for (std::size_t t = 0; t < 3; ++t)
    terms.push_back({indexes[t].data(), reinterpret_cast<const std::byte*>(values[t].data()), indexes[t].size()});
  for (const unsigned divisor : {1u, 3u, 4u}) {
    Floats expected(size);
    for (std::size_t t = 0; t < 3; ++t)
      for (std::size_t i = 0; i < indexes[t].size(); ++i) expected[indexes[t][i]] += values[t][i];
    for (float& value : expected) value /= static_cast<float>(divisor);
    Floats got(size, 9);
    for (std::size_t job = 0; job < 7; ++job)
      sum_sparse(terms, size * job / 7, size * (job + 1) / 7, divisor, got.data());
    EXPECT_TRUE(same_bits(got, expected)) << "divisor " << divisor;
  }
  Floats nothing(10, 1);
  sum_sparse({}, 0, 10, 2, nothing.data());
  EXPECT_EQ(nothing, Floats(10, 0));
}

TEST(OneBitBlocks, HaveTheSameBitsOnEveryInstructionSet) {
  std::mt19937 random(5);
  for (const std::size_t size : {1u, 512u, 3000u}) {
    Floats gradient = random_floats(random, size);
    gradient[size / 2] = size == 512 ? kInfinity : gradient[size / 2];
    const Floats residual = random_floats(random, size);
    std::vector<std::vector<std::byte>> blocks;
    std::vector<Floats> kept;
    std::vector<Floats> sums;
    for (const Isa isa : available_isas()) {
      blocks.emplace_back(one_bit_bytes(size));
      kept.push_back(residual);
      sums.emplace_back(size);
      encode_one_bit(gradient.data(), kept.back().data(), size, blocks.back().data(), isa);
      const std::vector<const std::byte*> terms(3, blocks.back().data());
      sum_one_bit(terms, 0, size, 3, sums.back().data(), isa);
      EXPECT_EQ(blocks.back(), blocks.front());
      EXPECT_TRUE(same_bits(kept.back(), kept.front()));
      EXPECT_TRUE(same_bits(sums.back(), sums.front()));
    }
    EXPECT_EQ(std::isfinite(sums[0][0]), size != 512);
    EXPECT_EQ(same_bits(kept[0], residual), size == 512) << "a block that is not finite keeps its residual";
  }
}

}  // namespace
}  // namespace poseidon::kernel
