#include "kernel/half.h"

#include <bit>
#include <cstdint>

#include "kernel/half_bits.h"

#if POSEIDON_X86_DISPATCH
#include <immintrin.h>
#endif

namespace poseidon::kernel {
namespace {

void widen_float16(const std::uint16_t* in, float* out, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) out[i] = std::bit_cast<float>(widen_float16_bits(in[i]));
}

void narrow_float16(const float* in, std::uint16_t* out, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) out[i] = narrow_float16_bits(std::bit_cast<std::uint32_t>(in[i]));
}

#if POSEIDON_X86_DISPATCH
// Every CPU with AVX2 has F16C.
__attribute__((target("avx,f16c"))) void widen_float16_f16c(const std::uint16_t* in, float* out, std::size_t n) {
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
  }
  widen_float16(in + i, out + i, n - i);
}

__attribute__((target("avx,f16c"))) void narrow_float16_f16c(const float* in, std::uint16_t* out, std::size_t n) {
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  narrow_float16(in + i, out + i, n - i);
}
#endif

}  // namespace

void widen(Isa isa, DType dtype, const std::byte* in_bytes, float* out, std::size_t element_count) {
  const auto* in = reinterpret_cast<const std::uint16_t*>(in_bytes);
  if (dtype == DType::bfloat16) {
    return run_with(
        isa, [=](auto) __attribute__((always_inline)) {
          for (std::size_t i = 0; i < element_count; ++i) out[i] = std::bit_cast<float>(widen_bfloat16_bits(in[i]));
        });
  }
#if POSEIDON_X86_DISPATCH
  if (isa != Isa::baseline) return widen_float16_f16c(in, out, element_count);
#endif
  widen_float16(in, out, element_count);
}

void narrow(Isa isa, DType dtype, const float* in, std::byte* out_bytes, std::size_t element_count) {
  auto* out = reinterpret_cast<std::uint16_t*>(out_bytes);
  if (dtype == DType::bfloat16) {
    return run_with(
        isa, [=](auto) __attribute__((always_inline)) {
          for (std::size_t i = 0; i < element_count; ++i) {
            out[i] = narrow_bfloat16_bits(std::bit_cast<std::uint32_t>(in[i]));
          }
        });
  }
#if POSEIDON_X86_DISPATCH
  if (isa != Isa::baseline) return narrow_float16_f16c(in, out, element_count);
#endif
  narrow_float16(in, out, element_count);
}

}  // namespace poseidon::kernel
