#include "kernel/half.h"

#include <gtest/gtest.h>

#include "arrays.h"

namespace poseidon::kernel {
namespace {

class Half : public testing::TestWithParam<DType> {};

TEST_P(Half, EveryValueWidensExactlyAndComesBack) {
  std::vector<std::uint16_t> all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  std::vector<float> wide(all.size());
  std::vector<std::uint16_t> back(all.size());
  for (const Isa isa : available_isas()) {
    widen(isa, GetParam(), reinterpret_cast<const std::byte*>(all.data()), wide.data(), all.size());
    narrow(isa, GetParam(), wide.data(), reinterpret_cast<std::byte*>(back.data()), all.size());
    const int bits = mantissa_bits(GetParam());
    for (std::size_t i = 0; i < all.size(); ++i) {
      const double value = half_value(all[i], bits);
      if (std::isnan(value)) {
        ASSERT_TRUE(std::isnan(wide[i])) << i;
        ASSERT_EQ(back[i], all[i] | (1u << (bits - 1))) << "a NaN keeps sign and payload and is quiet";
      } else {
        ASSERT_EQ(std::bit_cast<std::uint32_t>(wide[i]), std::bit_cast<std::uint32_t>(static_cast<float>(value))) << i;
        ASSERT_EQ(back[i], all[i]);
      }
    }
  }
}

TEST_P(Half, NarrowRoundsToNearestEven) {
  std::vector<float> wide;
  const int bits = mantissa_bits(GetParam());
  // All halves, the middles between neighbours and what lies just beside those.
  for (std::uint32_t i = 0; i < 65535; ++i) {
    const double low = half_value(static_cast<std::uint16_t>(i), bits);
    const double high = half_value(static_cast<std::uint16_t>(i + 1), bits);
    if (!std::isfinite(low) || !std::isfinite(high)) continue;
    const auto middle = static_cast<float>((low + high) / 2);
    wide.insert(wide.end(),
                {static_cast<float>(low), middle, std::nextafterf(middle, 1e38f), std::nextafterf(middle, -1e38f)});
  }
  std::mt19937 random(2);
  for (int i = 0; i < 100'000; ++i) {
    const float value = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    if (!std::isnan(value)) wide.push_back(value);
  }
  const float infinity = std::numeric_limits<float>::infinity();
  wide.insert(wide.end(),
              {65504.f, 65519.996f, 65520.f, 1e5f, 3.3895314e38f, 3.4028235e38f, infinity, -infinity, -0.f, 1e-45f});
  std::vector<std::uint16_t> out(wide.size());
  for (const Isa isa : available_isas()) {
    narrow(isa, GetParam(), wide.data(), reinterpret_cast<std::byte*>(out.data()), wide.size());
    for (std::size_t i = 0; i < wide.size(); ++i) ASSERT_EQ(out[i], nearest_half(wide[i], bits)) << wide[i];
  }
}

TEST_P(Half, NaNsNarrowToTheSameBitsOnEveryPath) {
  std::vector<float> nans;
  for (std::uint32_t payload = 1; payload < 0x800000u; payload = payload * 3 + 1) {
    nans.push_back(std::bit_cast<float>(0x7f800000u | payload));
    nans.push_back(std::bit_cast<float>(0xff800000u | payload));
  }
  std::vector<std::uint16_t> expected(nans.size());
  std::vector<std::uint16_t> out(nans.size());
  narrow(Isa::baseline, GetParam(), nans.data(), reinterpret_cast<std::byte*>(expected.data()), nans.size());
  for (const std::uint16_t bits : expected) EXPECT_TRUE(std::isnan(half_value(bits, mantissa_bits(GetParam()))));
  for (const Isa isa : available_isas()) {
    narrow(isa, GetParam(), nans.data(), reinterpret_cast<std::byte*>(out.data()), nans.size());
    EXPECT_EQ(out, expected);
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, Half, testing::Values(DType::float16, DType::bfloat16),
                         [](const auto& info) { return std::string(dtype_name(info.param)); });

}  // namespace
}  // namespace poseidon::kernel
