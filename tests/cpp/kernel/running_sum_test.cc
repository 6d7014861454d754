#include <gtest/gtest.h>

#include "arrays.h"
#include "kernel/kernel.h"

namespace poseidon::kernel {
namespace {

Bytes random_bytes(std::mt19937& random, DType dtype, std::size_t element_count) {
  if (dtype != DType::uint8 && dtype != DType::int32 && dtype != DType::int64) {
    return random_array(random, dtype, element_count);
  }
  Bytes bytes(element_count * dtype_bytes(dtype));
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

class RunningSum : public testing::TestWithParam<DType> {};

TEST_P(RunningSum, HasTheBitsOfTheSumAtOnce) {
  const DType dtype = GetParam();
  std::mt19937 random(21);
  for (const std::size_t element_count : {0, 1, 2, 15, 16, 63, 127, 128, 129, 1000, 4099, 20'011}) {
    for (const std::size_t input_count : {1, 2, 7, 8, 9, 16, 20}) {
      std::vector<Bytes> arrays;
      std::vector<const std::byte*> inputs;
      for (std::size_t i = 0; i < input_count; ++i) {
        arrays.push_back(random_bytes(random, dtype, element_count));
        inputs.push_back(arrays.back().data());
      }
      const unsigned divisor = 1 + static_cast<unsigned>(random() % 9);
      for (const Isa isa : available_isas()) {
        Bytes expected(element_count * dtype_bytes(dtype));
        sum(inputs, expected.data(), element_count, dtype, divisor, isa);
        Bytes sum(element_count * running_sum_bytes(dtype));
        start_sum(inputs[0], sum.data(), element_count, dtype, isa);
        for (std::size_t i = 1; i < input_count; ++i) accumulate(inputs[i], sum.data(), element_count, dtype, isa);
        Bytes out(expected.size());
        finish_sum(sum.data(), out.data(), element_count, dtype, divisor, isa);
        ASSERT_EQ(out, expected) << element_count << " elements, " << input_count << " inputs, divisor " << divisor;
        finish_sum(sum.data(), sum.data(), element_count, dtype, divisor, isa);
        sum.resize(expected.size());
        ASSERT_EQ(sum, expected) << "in place";
      }
    }
  }
}

TEST_P(RunningSum, AnInputMayComeInPieces) {
  const DType dtype = GetParam();
  constexpr std::size_t element_count = 3001;
  std::mt19937 random(22);
  const Bytes first = random_bytes(random, dtype, element_count);
  const Bytes second = random_bytes(random, dtype, element_count);
  Bytes whole(element_count * running_sum_bytes(dtype));
  start_sum(first.data(), whole.data(), element_count, dtype);
  Bytes pieces = whole;
  accumulate(second.data(), whole.data(), element_count, dtype);
  for (std::size_t begin = 0, n = 1; begin < element_count; begin += n, n = n * 2 + 1) {
    n = std::min(n, element_count - begin);
    accumulate(second.data() + begin * dtype_bytes(dtype), pieces.data() + begin * running_sum_bytes(dtype), n, dtype);
  }
  EXPECT_EQ(pieces, whole);
}

INSTANTIATE_TEST_SUITE_P(DTypes, RunningSum,
                         testing::Values(DType::float32, DType::float64, DType::float16, DType::bfloat16, DType::uint8,
                                         DType::int32, DType::int64),
                         [](const auto& info) { return std::string(dtype_name(info.param)); });

}  // namespace
}  // namespace poseidon::kernel
