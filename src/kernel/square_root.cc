#include "kernel/square_root.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

#include "kernel/square_root_v4.h"

namespace poseidon::kernel {

#if POSEIDON_X86_DISPATCH
Rounding root_rounding() {
  static const Rounding here = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_is("amd")) return Rounding::refined;
    return __builtin_cpu_is("intel") && best_isa() == Isa::v4 ? Rounding::refined_v4 : Rounding::ieee;
  }();
  return here;
}
#endif

namespace {

template <typename T>
void ieee_roots(Isa isa, const T* values, T* roots, std::size_t n) {
  run_with(
      isa, [=](auto) __attribute__((always_inline)) {
        POSEIDON_INDEPENDENT_ELEMENTS
        for (std::size_t i = 0; i < n; ++i) roots[i] = ieee_root(values[i]);
      });
}

#if POSEIDON_X86_DISPATCH
constexpr std::size_t kBlock = 512;
constexpr std::size_t kLanes = 8;

/// out[i] ≈ 1 / √in[i] with 12 correct bits. It works on whole vectors: `n` is a multiple of kLanes.
void estimate_inverse_roots(const float* in, float* out, std::size_t n) {
  for (std::size_t i = 0; i < n; i += 4) _mm_storeu_ps(out + i, _mm_rsqrt_ps(_mm_loadu_ps(in + i)));
}

__attribute__((POSEIDON_TARGET_V3)) void estimate_inverse_roots_v3(const float* in, float* out, std::size_t n) {
  for (std::size_t i = 0; i < n; i += 8) _mm256_storeu_ps(out + i, _mm256_rsqrt_ps(_mm256_loadu_ps(in + i)));
}

/// Improves root and inverse root by one step from the estimate, then corrects the root by its residual.
POSEIDON_INLINE float refine(float value, float estimate) {
  const float root = value * estimate;
  const float half_inverse = 0.5f * estimate;
  const float error = 0.5f - root * half_inverse;
  const float better_root = root + root * error;
  const float better_half_inverse = half_inverse + half_inverse * error;
  return better_root + (value - better_root * better_root) * better_half_inverse;
}

/// Whether the steps do not apply: zeros, subnormal and negative numbers, NaN, infinity, and values with which a step
/// overflows.
POSEIDON_INLINE bool is_special(float value) {
  constexpr std::uint32_t smallest = 0x00800000u;  // 2^-126
  constexpr std::uint32_t end = 0x7f000000u;       // 2^127
  return std::bit_cast<std::uint32_t>(value) - smallest >= end - smallest;
}

void refined_roots(Isa isa, const float* values, float* roots, std::size_t element_count) {
  alignas(64) std::array<float, kBlock> estimates;  // NOLINT(cppcoreguidelines-pro-type-member-init): all are written
  const auto estimate_all = isa == Isa::baseline ? estimate_inverse_roots : estimate_inverse_roots_v3;
  for (std::size_t first = 0; first < element_count; first += kBlock) {
    const std::size_t n = std::min(kBlock, element_count - first);
    const std::size_t whole = n / kLanes * kLanes;
    estimate_all(values + first, estimates.data(), whole);
    if (whole < n) {
      std::array<float, kLanes> rest{};
      std::copy_n(values + first + whole, n - whole, rest.begin());
      estimate_all(rest.data(), estimates.data() + whole, kLanes);
    }
    run_with(
        isa, [ n, in = values + first, estimate = estimates.data(), out = roots + first ](auto)
                 __attribute__((always_inline)) {
                   int special = 0;
                   POSEIDON_INDEPENDENT_ELEMENTS
                   for (std::size_t i = 0; i < n; ++i) {
                     special |= static_cast<int>(is_special(in[i]));
                     out[i] = refine(in[i], estimate[i]);
                   }
                   if (special == 0) return;
                   for (std::size_t i = 0; i < n; ++i) out[i] = is_special(in[i]) ? ieee_root(in[i]) : out[i];
                 });
  }
}

template <Rounding rounding>
__attribute__((POSEIDON_TARGET_V4)) void roots_v4(const float* values, float* roots, std::size_t element_count) {
  for (std::size_t first = 0; first < element_count; first += kV4Lanes) {
    const std::size_t n = std::min(kV4Lanes, element_count - first);
    const auto lanes = static_cast<__mmask16>((1u << n) - 1);
    const __m512 value = _mm512_mask_loadu_ps(_mm512_set1_ps(1.f), lanes, values + first);
    _mm512_mask_storeu_ps(roots + first, lanes, root_of<rounding>(value));
  }
}
#endif

}  // namespace

void square_root(Isa isa, const float* values, float* roots, std::size_t element_count) {
#if POSEIDON_X86_DISPATCH
  const Rounding rounding = root_rounding();
  if (rounding == Rounding::refined_v4) return roots_v4<Rounding::refined_v4>(values, roots, element_count);
  if (rounding == Rounding::refined) {
    if (isa == Isa::v4) return roots_v4<Rounding::refined>(values, roots, element_count);
    return refined_roots(isa, values, roots, element_count);
  }
#endif
  ieee_roots(isa, values, roots, element_count);
}

void square_root(Isa isa, const double* values, double* roots, std::size_t element_count) {
  ieee_roots(isa, values, roots, element_count);
}

}  // namespace poseidon::kernel
