// Measures the lossless coder on one core against a copy of the values as they are, from memory to memory, in segments
// as a connection codes them. `make core-bench` builds and runs it. Values are normally distributed, differences those
// of parameters of a scale of 0.02 that an optimizer moves by about 1e-4.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/coding.h"
#include "kernel/half_bits.h"
#include "kernel/int8_blocks.h"
#include "kernel/kernel.h"
#include "kernel/lossless.h"
#include "poseidon/dtype.h"
#include "transport/coded_payload.h"

namespace poseidon {
namespace {

constexpr std::size_t kBytes = std::size_t{64} << 20;
constexpr int kRounds = 9;

using Bytes = std::vector<std::byte>;

struct Case {
  const char* name;
  Coding coding;
  DType dtype;      // of the sum of decode and add; of no meaning for differences
  double least[3];  // of a copy's rate: encode, decode, decode and add
};

constexpr Case kCases[] = {
    {"float32", Coding::float32, DType::float32, {0.4, 0.35, 0.3}},
    {"float16", Coding::float16, DType::float16, {0.2, 0.175, 0.15}},
    {"bfloat16", Coding::bfloat16, DType::bfloat16, {0.2, 0.175, 0.15}},
    {"difference32", Coding::difference32, DType::float32, {0, 0, 0}},
    {"difference16", Coding::difference16, DType::bfloat16, {0, 0, 0}},
    {"int8", Coding::int8, DType::int8_blocks, {0, 0, 0}},
};

template <typename Word>
void put(Bytes& bytes, std::size_t index, Word word) {
  std::memcpy(bytes.data() + index * sizeof word, &word, sizeof word);
}

/// Blocks of bytes with scales.
Bytes int8_values() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> values(kBytes / dtype_bytes(DType::int8_blocks) * dtype_values(DType::int8_blocks));
  for (float& value : values) value = normal(random) * 1e-3F;
  Bytes bytes(kBytes);
  kernel::encode_int8(kernel::best_isa(), values.data(), bytes.data(), values.size());
  return bytes;
}

Bytes values_of(Coding coding) {
  if (coding == Coding::int8) return int8_values();
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const std::size_t width = value_bytes(coding);
  Bytes bytes(kBytes);
  Bytes base(kBytes);
  for (std::size_t i = 0; i < kBytes / width; ++i) {
    const bool differs = coding == Coding::difference32 || coding == Coding::difference16;
    const float value = normal(random) * (differs ? 0.02F : 1e-3F);
    const float before = differs ? value - 1e-4F * 0.3F * normal(random) * normal(random) : 0.0F;
    if (coding == Coding::float16) {
      put(bytes, i, kernel::narrow_float16_bits(std::bit_cast<std::uint32_t>(value)));
    } else if (width == 2) {
      put(bytes, i, kernel::narrow_bfloat16_bits(std::bit_cast<std::uint32_t>(value)));
      put(base, i, kernel::narrow_bfloat16_bits(std::bit_cast<std::uint32_t>(before)));
    } else {
      put(bytes, i, value);
      put(base, i, before);
    }
  }
  if (coding == Coding::difference32 || coding == Coding::difference16)
    kernel::difference(bytes.data(), base.data(), bytes.data(), kBytes / width, width);
  return bytes;
}

/// The seconds of each, the best of some rounds in which they take turns.
std::vector<double> best_seconds(const std::vector<std::function<void()>>& works) {
  std::vector<double> best(works.size(), std::numeric_limits<double>::infinity());
  for (int round = 0; round < kRounds; ++round)
    for (std::size_t i = 0; i < works.size(); ++i) {
      const std::int64_t begin = now_ns();
      works[i]();
      best[i] = std::min(best[i], static_cast<double>(now_ns() - begin) * 1e-9);
    }
  return best;
}

bool measure(const Case& about) {
  const Bytes values = values_of(about.coding);
  const std::size_t count = kSegmentBytes / value_bytes(about.coding);
  const std::size_t segment_count = kBytes / kSegmentBytes;
  Bytes out(kBytes);
  Bytes coded(segment_count * kSegmentRoomBytes);
  std::vector<std::size_t> sizes(segment_count);
  Bytes segment(kSegmentBytes);
  Bytes sum(kBytes / value_bytes(about.coding) * sizeof(float));
  const std::size_t added_count = kSegmentBytes / dtype_bytes(about.dtype);  // of int8 whole blocks
  const auto encode = [&] {
    for (std::size_t i = 0; i < segment_count; ++i)
      sizes[i] = kernel::encode_lossless(about.coding, values.data() + i * kSegmentBytes, count,
                                         coded.data() + i * kSegmentRoomBytes);
  };
  const auto decode_to = [&](std::size_t i, std::byte* place) {
    kernel::decode_lossless(about.coding, std::span(coded).subspan(i * kSegmentRoomBytes, sizes[i]), place, count);
  };
  const auto seconds = best_seconds({
      [&] { std::memcpy(out.data(), values.data(), kBytes); },
      encode,
      [&] {
        for (std::size_t i = 0; i < segment_count; ++i) decode_to(i, out.data() + i * kSegmentBytes);
      },
      [&] {
        for (std::size_t i = 0; i < segment_count; ++i) {
          decode_to(i, segment.data());
          if (about.coding == Coding::difference32 || about.coding == Coding::difference16)
            kernel::add_difference(segment.data(), out.data() + i * kSegmentBytes, out.data() + i * kSegmentBytes,
                                   count, value_bytes(about.coding));
          else
            kernel::accumulate(segment.data(), sum.data() + i * count * sizeof(float), added_count, about.dtype);
        }
      },
  });
  std::size_t coded_bytes = 0;
  for (const std::size_t size : sizes) coded_bytes += size;
  bool met = true;
  std::printf("%-13s %6.2f", about.name,
              8.0 * static_cast<double>(coded_bytes) / static_cast<double>(kBytes / value_bytes(about.coding)));
  std::printf("  %6.2f", kBytes / seconds[0] * 1e-9);
  for (std::size_t i = 0; i < 3; ++i) {
    const double share = seconds[0] / seconds[i + 1];
    met = met && share >= about.least[i];
    std::printf("  %6.2f (%4.2f)", kBytes / seconds[i + 1] * 1e-9, share);
  }
  std::printf("  %s\n", about.least[0] == 0 ? "" : met ? "met" : "missed");
  return met;
}

}  // namespace
}  // namespace poseidon

int main() {
  std::printf("GB/s of values, in brackets against a copy; bars of float32: 0.4, 0.35, 0.3, of 16 bits half\n");
  std::printf("%-13s %6s  %6s  %13s  %13s  %13s\n", "values", "bits", "copy", "encode", "decode", "decode, add");
  bool met = true;
  for (const auto& about : poseidon::kCases) met = poseidon::measure(about) && met;
  return met ? 0 : 1;
}
