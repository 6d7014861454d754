// Chooses the instruction set with which the kernels run.
//
// A kernel is a body of plain loops that is inlined into one function per instruction set. The choice is made when the
// program runs. target_clones cannot be used: they do not work on templates, and the ifunc resolvers behind them run
// before a sanitizer's runtime is ready.
#pragma once

#include <type_traits>

#if defined(__x86_64__) && defined(__GNUC__)
#define POSEIDON_X86_DISPATCH 1
#else
#define POSEIDON_X86_DISPATCH 0
#endif
// Every aarch64 CPU has NEON.
#if defined(__aarch64__) && defined(__GNUC__)
#define POSEIDON_NEON 1
#else
#define POSEIDON_NEON 0
#endif

/// Marks loops whose arrays are the same or do not overlap, so that no element depends on another element. clang checks
/// for overlap at run time instead.
#if defined(__clang__)
#define POSEIDON_INDEPENDENT_ELEMENTS
#else
#define POSEIDON_INDEPENDENT_ELEMENTS _Pragma("GCC ivdep")
#endif

/// Asks for 512-bit vectors if the CPU has them, because arithmetic limits factor products.
#if defined(__clang__)
#define POSEIDON_TARGET_V4 \
  target("avx2,f16c,fma,bmi,bmi2,avx512f,avx512bw,avx512cd,avx512dq,avx512vl"), min_vector_width(512)
#else
#define POSEIDON_TARGET_V4 \
  target("avx2,f16c,fma,bmi,bmi2,avx512f,avx512bw,avx512cd,avx512dq,avx512vl,prefer-vector-width=512")
#endif
// Every CPU with AVX2 has F16C.
#define POSEIDON_TARGET_V3 target("avx2,f16c,fma,bmi,bmi2")

#define POSEIDON_INLINE inline __attribute__((always_inline))

namespace poseidon::kernel {

/// NEON, or levels of the x86-64 psABI; `baseline` is whatever the compiler was told to build for.
enum class Isa { baseline, neon, v3, v4 };

template <Isa isa>
using IsaTag = std::integral_constant<Isa, isa>;

/// The highest level that this CPU has.
inline Isa best_isa() {
#if POSEIDON_X86_DISPATCH
  static const Isa best = [] {
    __builtin_cpu_init();
    const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                    __builtin_cpu_supports("bmi2");
    const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vl");
    return v4 ? Isa::v4 : v3 ? Isa::v3 : Isa::baseline;
  }();
  return best;
#else
  return POSEIDON_NEON ? Isa::neon : Isa::baseline;
#endif
}

#if POSEIDON_X86_DISPATCH
template <typename Body>
__attribute__((POSEIDON_TARGET_V3, noinline)) void run_v3(const Body& body) {
  body(IsaTag<Isa::v3>{});
}
template <typename Body>
__attribute__((POSEIDON_TARGET_V4, noinline)) void run_v4(const Body& body) {
  body(IsaTag<Isa::v4>{});
}
#endif

/// Calls `body(IsaTag<isa>{})` compiled for `isa`, which this CPU must have. `body` is an
/// always_inline lambda whose hot loops stand in it or in POSEIDON_INLINE functions.
template <typename Body>
void run_with(Isa isa, const Body& body) {
#if POSEIDON_X86_DISPATCH
  if (isa == Isa::v4) return run_v4(body);
  if (isa == Isa::v3) return run_v3(body);
#elif POSEIDON_NEON
  if (isa == Isa::neon) return body(IsaTag<Isa::neon>{});
#else
  static_cast<void>(isa);
#endif
  body(IsaTag<Isa::baseline>{});
}

}  // namespace poseidon::kernel
