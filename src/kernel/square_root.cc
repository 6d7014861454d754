#include "kernel/square_root.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

#if POSEIDON_X86_DISPATCH
#include <immintrin.h>
#endif

namespace poseidon::kernel {
namespace {

template <typename T>
void ieee_roots(Isa isa, T* values, std::size_t n) {
  run_with(
      isa, [=](auto) __attribute__((always_inline)) {
        for (std::size_t i = 0; i < n; ++i) values[i] = ieee_root(values[i]);
      });
}

#if POSEIDON_X86_DISPATCH
constexpr std::size_t kBlock = 512;
constexpr std::size_t kLanes = 8;

/// out[i] ≈ 1 / √in[i] to 12 bits, for whole vectors; the arrays are padded to kBlock.
void estimate_inverse_roots(const float* in, float* out, std::size_t n) {
  for (std::size_t i = 0; i < n; i += 4) _mm_storeu_ps(out + i, _mm_rsqrt_ps(_mm_loadu_ps(in + i)));
}

__attribute__((POSEIDON_TARGET_V3)) void estimate_inverse_roots_v3(const float* in, float* out, std::size_t n) {
  for (std::size_t i = 0; i < n; i += 8) _mm256_storeu_ps(out + i, _mm256_rsqrt_ps(_mm256_loadu_ps(in + i)));
}

/// One step from the estimate to root and inverse root, and a last one to the root's residual.
POSEIDON_INLINE float refine(float value, float estimate) {
  const float root = value * estimate;
  const float half_inverse = 0.5f * estimate;
  const float error = 0.5f - root * half_inverse;
  const float better_root = root + root * error;
  const float better_half_inverse = half_inverse + half_inverse * error;
  return better_root + (value - better_root * better_root) * better_half_inverse;
}

/// Zeros, subnormal numbers, negative numbers, NaN, infinity and what overflows on the way.
POSEIDON_INLINE bool is_special(float value) {
  constexpr std::uint32_t smallest = 0x00800000u;  // 2^-126
  constexpr std::uint32_t end = 0x7f000000u;       // 2^127
  return std::bit_cast<std::uint32_t>(value) - smallest >= end - smallest;
}

void refined_roots(Isa isa, float* values, std::size_t element_count) {
  alignas(64) std::array<float, kBlock> held{};
  alignas(64) std::array<float, kBlock> estimates{};
  for (std::size_t first = 0; first < element_count; first += kBlock) {
    const std::size_t n = std::min(kBlock, element_count - first);
    std::copy_n(values + first, n, held.begin());
    // The estimates are made in whole vectors.
    std::fill_n(held.begin() + static_cast<std::ptrdiff_t>(n), std::min(kLanes, kBlock - n), 1.f);
    const auto estimate_all = isa == Isa::baseline ? estimate_inverse_roots : estimate_inverse_roots_v3;
    estimate_all(held.data(), estimates.data(), n);
    run_with(
        isa, [ n, in = held.data(), estimate = estimates.data(), out = values + first ](auto)
                 __attribute__((always_inline)) {
                   int special = 0;
                   for (std::size_t i = 0; i < n; ++i) {
                     special |= static_cast<int>(is_special(in[i]));
                     out[i] = refine(in[i], estimate[i]);
                   }
                   if (special == 0) return;
                   for (std::size_t i = 0; i < n; ++i) out[i] = is_special(in[i]) ? ieee_root(in[i]) : out[i];
                 });
  }
}
#endif

}  // namespace

bool refines_estimates() {
#if POSEIDON_X86_DISPATCH
  static const bool refines = [] {
    __builtin_cpu_init();
    return __builtin_cpu_is("amd") != 0;
  }();
  return refines;
#else
  return false;
#endif
}

void square_root(Isa isa, float* values, std::size_t element_count) {
#if POSEIDON_X86_DISPATCH
  if (refines_estimates()) return refined_roots(isa, values, element_count);
#endif
  ieee_roots(isa, values, element_count);
}

void square_root(Isa isa, double* values, std::size_t element_count) { ieee_roots(isa, values, element_count); }

}  // namespace poseidon::kernel
