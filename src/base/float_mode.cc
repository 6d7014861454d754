#include "base/float_mode.h"

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace poseidon {

void keep_denormals() {
#if defined(__x86_64__)
  constexpr unsigned flush_to_zero = 1u << 15;      // results
  constexpr unsigned denormals_are_zero = 1u << 6;  // operands
  _mm_setcsr(_mm_getcsr() & ~(flush_to_zero | denormals_are_zero));
#elif defined(__aarch64__)
  constexpr std::uint64_t flush_to_zero = (std::uint64_t{1} << 24) | (std::uint64_t{1} << 19);  // also of 16 bits
  std::uint64_t control = 0;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  asm volatile("msr fpcr, %0" : : "r"(control & ~flush_to_zero));
#endif
}

}  // namespace poseidon
