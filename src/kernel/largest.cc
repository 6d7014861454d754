// Top-k: the elements of largest magnitude.
#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <vector>

#include "base/invariant.h"
#include "kernel/compression.h"
#include "kernel/dispatch.h"

namespace poseidon::kernel {
namespace {

// Most blocks have no element that is taken, and cost one comparison.
constexpr std::size_t kBlock = 16;
constexpr std::size_t kSampleCount = 16384;
constexpr std::uint32_t kMagnitude = 0x7fffffffu;
constexpr std::uint32_t kInfinityBits = 0x7f800000u;

/// Magnitudes are compared as bits: they are in the order of their bits, and NaN comes after infinity.
POSEIDON_INLINE std::uint32_t magnitude(float value) { return std::bit_cast<std::uint32_t>(value) & kMagnitude; }

/// gradient + residual, of which a block is computed at a time.
struct Input {
  const float* gradient;
  const float* residual;
  std::size_t count;

  float at(std::size_t i) const { return gradient[i] + residual[i]; }
};

/// Elements of at least these bits, and the largest of all.
struct Candidates {
  std::vector<std::uint32_t> bits;
  std::uint32_t largest = 0;
};

/// The elements to take: all above the threshold, and the first so many that are equal to it.
struct Selection {
  std::uint32_t threshold = 0;
  std::size_t equal_count = 0;
  bool finite = true;  // all elements are
};

/// Computes the block from `first` on, and returns its largest magnitude.
POSEIDON_INLINE std::uint32_t add_block(const Input& input, std::size_t first, std::size_t count, float* values) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = input.gradient[first + i] + input.residual[first + i];
    largest = std::max(largest, magnitude(values[i]));
  }
  return largest;
}

/// Calls body(first, count) for each block. Full blocks have a constant size.
template <typename Body>
POSEIDON_INLINE void for_blocks(std::size_t element_count, const Body& body) {
  std::size_t first = 0;
  for (; first + kBlock <= element_count; first += kBlock) body(first, kBlock);
  if (first < element_count) body(first, element_count - first);
}

Candidates at_least(Isa isa, const Input& input, std::uint32_t least) {
  Candidates found;
  run_with(
      isa, [&](auto) __attribute__((always_inline)) {
        for_blocks(
            input.count, [&](std::size_t first, std::size_t count) __attribute__((always_inline)) {
              alignas(64) float values[kBlock];
              const std::uint32_t largest = add_block(input, first, count, values);
              found.largest = std::max(found.largest, largest);
              if (largest < least) return;
              for (std::size_t i = 0; i < count; ++i)
                if (magnitude(values[i]) >= least) found.bits.push_back(magnitude(values[i]));
            });
      });
  return found;
}

/// A magnitude that somewhat more than `count` elements have, as a sample says. It decides only how much is compared.
std::uint32_t guess(const Input& input, std::size_t count) {
  const std::size_t stride = std::max<std::size_t>(1, input.count / kSampleCount);
  std::vector<std::uint32_t> sample;
  for (std::size_t i = 0; i < input.count; i += stride) sample.push_back(magnitude(input.at(i)));
  const std::size_t expected = count / stride;
  const std::size_t place = expected + expected / 2 + 64;
  if (place >= sample.size()) return 1;
  std::ranges::nth_element(sample, sample.begin() + static_cast<std::ptrdiff_t>(place), std::greater());
  return std::max(1u, sample[place]);
}

Selection select(Isa isa, const Input& input, std::size_t count) {
  const std::uint32_t least = guess(input, count);
  Candidates found = at_least(isa, input, least);
  if (found.bits.size() < count && least > 1) found = at_least(isa, input, 1);
  const bool finite = found.largest < kInfinityBits;
  if (found.bits.size() < count) return {0, count - found.bits.size(), finite};  // all but zeros, and some zeros
  const auto last = found.bits.begin() + static_cast<std::ptrdiff_t>(count - 1);
  std::ranges::nth_element(found.bits, last, std::greater());
  const auto above = std::count_if(found.bits.begin(), last, [&](std::uint32_t bits) { return bits > *last; });
  return {*last, count - static_cast<std::size_t>(above), finite};
}

}  // namespace

void take_largest(const float* gradient, float* residual, std::size_t element_count, std::span<std::uint32_t> indexes,
                  float* values, Isa isa) {
  invariant(indexes.size() <= element_count, "no more elements are taken than there are");
  if (indexes.empty()) return;
  const Input input{gradient, residual, element_count};
  Selection wanted = select(isa, input, indexes.size());
  std::size_t taken = 0;
  run_with(
      isa, [&](auto) __attribute__((always_inline)) {
        for_blocks(
            element_count, [&](std::size_t first, std::size_t count) __attribute__((always_inline)) {
              alignas(64) float block[kBlock];
              const std::uint32_t largest = add_block(input, first, count, block);
              if (wanted.finite) std::memcpy(residual + first, block, count * sizeof(float));
              if (largest < wanted.threshold) return;
              for (std::size_t i = 0; i < count; ++i) {
                const std::uint32_t bits = magnitude(block[i]);
                if (bits < wanted.threshold || (bits == wanted.threshold && wanted.equal_count == 0)) continue;
                if (bits == wanted.threshold) --wanted.equal_count;
                indexes[taken] = static_cast<std::uint32_t>(first + i);
                values[taken++] = block[i];
                if (wanted.finite) residual[first + i] = 0;
              }
            });
      });
}

void sum_sparse(std::span<const RowTerm> terms, std::size_t begin, std::size_t end, unsigned divisor, float* out) {
  invariant(begin <= end, "a range of elements ends after its beginning");
  constexpr std::size_t cached_count = 8192;  // elements that stay in the L1 cache until they are divided
  std::vector<std::size_t> next;
  for (const RowTerm& term : terms)
    next.push_back(
        static_cast<std::size_t>(std::lower_bound(term.indexes, term.indexes + term.count, begin) - term.indexes));
  for (std::size_t first = begin; first < end; first += cached_count) {
    const std::size_t last = std::min(end, first + cached_count);
    std::fill(out + first, out + last, 0.0F);
    for (std::size_t t = 0; t < terms.size(); ++t) {
      const auto* const values = reinterpret_cast<const float*>(terms[t].values);
      for (std::size_t& at = next[t]; at < terms[t].count && terms[t].indexes[at] < last; ++at)
        out[terms[t].indexes[at]] += values[at];
    }
    auto* const sums = reinterpret_cast<std::byte*>(out + first);
    if (divisor > 1) finish_sum(sums, sums, last - first, DType::float32, divisor);
  }
}

}  // namespace poseidon::kernel
