#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "arrays.h"
#include "kernel/kernel.h"

namespace poseidon::kernel {
namespace {

std::vector<float> random_values(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  // Blocks differ in magnitude, and some are all zeros.
  for (std::size_t i = 0; i < count; ++i)
    values[i] = (i / 256) % 5 == 4 ? 0.0F : normal(random) * std::ldexp(1.0F, static_cast<int>((i / 256) % 20) - 10);
  return values;
}

Bytes encoded(Isa isa, DType dtype, const std::vector<float>& values) {
  Bytes out(array_bytes(dtype, values.size()));
  encode(dtype, values.data(), out.data(), values.size(), isa);
  return out;
}

std::vector<float> decoded(DType dtype, const Bytes& bytes, std::size_t count) {
  std::vector<float> out(count);
  decode(dtype, bytes.data(), out.data(), count);
  return out;
}

std::vector<float> rounded(DType dtype, const std::vector<float>& values) {
  return decoded(dtype, encoded(best_isa(), dtype, values), values.size());
}

class Encoding : public testing::TestWithParam<DType> {};

const std::vector<std::size_t> kCounts{0, 1, 2, 255, 256, 257, 1023, 1024, 1025, 5000};

TEST_P(Encoding, RoundsEachValueOnceToNearest) {
  const DType dtype = GetParam();
  const auto values = random_values(3001, 1);
  const auto result = rounded(dtype, values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (dtype != DType::int8_blocks) {
      EXPECT_EQ(result[i], half_value(nearest_half(values[i], mantissa_bits(dtype)), mantissa_bits(dtype)));
      continue;
    }
    const auto begin = values.begin() + static_cast<std::ptrdiff_t>(i / 256 * 256);
    const auto end = std::min(begin + 256, values.end());
    float largest = 0;
    for (auto value = begin; value != end; ++value) largest = std::max(largest, std::fabs(*value));
    // Half a level, and what the float32 arithmetic itself rounds.
    EXPECT_LE(std::fabs(result[i] - values[i]), largest / 127 * 0.5F * 1.0001F) << i;
    if (std::fabs(values[i]) == largest) EXPECT_NEAR(result[i], values[i], largest * 1e-6F);
  }
}

TEST_P(Encoding, EveryInstructionSetGivesTheSameBits) {
  for (const std::size_t count : kCounts) {
    const auto values = random_values(count, 2);
    const Bytes expected = encoded(Isa::baseline, GetParam(), values);
    for (const Isa isa : available_isas()) {
      EXPECT_EQ(encoded(isa, GetParam(), values), expected) << count;
      std::vector<float> out(count);
      decode(GetParam(), expected.data(), out.data(), count, isa);
      EXPECT_EQ(out, decoded(GetParam(), expected, count)) << count;
    }
  }
}

TEST_P(Encoding, MayStayInTheMemoryOfTheValues) {
  const DType dtype = GetParam();
  for (const std::size_t count : kCounts) {
    const auto values = random_values(count, 3);
    const Bytes expected = encoded(best_isa(), dtype, values);
    auto memory = values;
    memory.resize(std::max(count, expected.size() / sizeof(float)));
    auto* const bytes = reinterpret_cast<std::byte*>(memory.data());
    encode(dtype, memory.data(), bytes, count);
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), bytes)) << count;
    if (memory.size() > count) continue;  // a few values need more room as a block than they have
    std::byte* const tail = bytes + count * sizeof(float) - expected.size();
    std::copy(expected.begin(), expected.end(), tail);
    decode(dtype, tail, memory.data(), count);
    EXPECT_EQ(memory, decoded(dtype, expected, count)) << count;
  }
}

TEST_P(Encoding, InfinityAndNaNStayVisible) {
  for (const float bad : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
    auto values = random_values(1000, 4);
    values[300] = bad;
    const auto result = rounded(GetParam(), values);
    EXPECT_FALSE(std::isfinite(result[300]));
    EXPECT_TRUE(std::isfinite(result[100])) << "another block";
    EXPECT_TRUE(std::isfinite(result[600])) << "another block";
    std::vector<float> residual(values.size(), 0.0F);
    Bytes out(array_bytes(GetParam(), values.size()));
    encode_with_feedback(GetParam(), values.data(), residual.data(), out.data(), values.size());
    EXPECT_TRUE(std::ranges::all_of(residual, [](float rest) { return std::isfinite(rest); }));
  }
}

TEST_P(Encoding, TinyAndHugeValues) {
  std::vector<float> values(256, 1e-40F);
  for (const float value : rounded(GetParam(), values)) EXPECT_LE(std::fabs(value), 1e-38F);
  values.assign(256, 3e38F);
  for (const float value : rounded(GetParam(), values)) EXPECT_GT(value, 2.9e38F);
}

// What was sent in all steps is what was to be sent, but for the rest that is still kept.
TEST_P(Encoding, FeedbackLosesNothing) {
  constexpr std::size_t count = 700;
  std::vector<float> residual(count, 0.0F);
  std::vector<double> wanted(count, 0.0);
  std::vector<double> sent(count, 0.0);
  for (unsigned step = 0; step < 50; ++step) {
    const auto values = random_values(count, 100 + step);
    Bytes out(array_bytes(GetParam(), count));
    Bytes again(out.size());
    const auto before = residual;
    encode_with_feedback(GetParam(), values.data(), residual.data(), out.data(), count);
    for (const Isa isa : available_isas()) {
      auto rest = before;
      encode_with_feedback(GetParam(), values.data(), rest.data(), again.data(), count, isa);
      ASSERT_EQ(again, out);
      ASSERT_EQ(rest, residual);
    }
    const auto values_sent = decoded(GetParam(), out, count);
    for (std::size_t i = 0; i < count; ++i) {
      wanted[i] += values[i];
      sent[i] += values_sent[i];
    }
  }
  for (std::size_t i = 0; i < count; ++i)
    EXPECT_NEAR(sent[i] + residual[i], wanted[i], 1e-5 * std::max(1.0, std::fabs(wanted[i]))) << i;
}

TEST_P(Encoding, FeedbackInTheGradientsOwnMemory) {
  for (const std::size_t count : {1000, 1024, 5000}) {
    auto values = random_values(count, 7);
    const auto before = random_values(count, 8);
    auto expected_rest = before;
    Bytes expected(array_bytes(GetParam(), count));
    encode_with_feedback(GetParam(), values.data(), expected_rest.data(), expected.data(), count);
    auto rest = before;
    values.resize(std::max(count, expected.size() / sizeof(float)));
    auto* const bytes = reinterpret_cast<std::byte*>(values.data());
    encode_with_feedback(GetParam(), values.data(), rest.data(), bytes, count);
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), bytes)) << count;
    EXPECT_EQ(rest, expected_rest) << count;
  }
}

TEST(Int8Blocks, SumsAreThoseOfTheDecodedValues) {
  constexpr std::size_t blocks = 9;
  constexpr std::size_t count = blocks * 256;
  std::vector<Bytes> arrays;
  std::vector<const std::byte*> inputs;
  std::vector<float> expected(count, 0.0F);
  for (unsigned rank = 0; rank < 5; ++rank) {
    arrays.push_back(encoded(best_isa(), DType::int8_blocks, random_values(count, 200 + rank)));
    const auto values = decoded(DType::int8_blocks, arrays.back(), count);
    for (std::size_t i = 0; i < count; ++i) expected[i] = rank == 0 ? values[i] : expected[i] + values[i];
  }
  for (const Bytes& array : arrays) inputs.push_back(array.data());
  for (float& value : expected) value /= 3;
  const Bytes reference = encoded(best_isa(), DType::int8_blocks, expected);
  for (const Isa isa : available_isas()) {
    Bytes out(reference.size());
    sum(inputs, out.data(), blocks, DType::int8_blocks, 3, isa);
    EXPECT_EQ(out, reference);
    Bytes running(blocks * running_sum_bytes(DType::int8_blocks));
    start_sum(inputs[0], running.data(), blocks, DType::int8_blocks, isa);
    for (std::size_t i = 1; i < inputs.size(); ++i)
      accumulate(inputs[i], running.data(), blocks, DType::int8_blocks, isa);
    finish_sum(running.data(), running.data(), blocks, DType::int8_blocks, 3, isa);
    running.resize(reference.size());
    EXPECT_EQ(running, reference) << "in place";
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, Encoding, testing::Values(DType::bfloat16, DType::float16, DType::int8_blocks),
                         [](const auto& info) { return std::string(dtype_name(info.param)); });

}  // namespace
}  // namespace poseidon::kernel
