// The loops of Adam and AdamW.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <type_traits>

#include "kernel/square_root.h"
#include "kernel/update_rules/adam_scalars.h"
#include "kernel/update_rules/adam_v4.h"

namespace poseidon::kernel {

/// Applies weight decay and updates the moments.
template <Decay decay, typename T>
POSEIDON_INLINE void adam_moments(AdamScalars<T> scalars, AdamArrays<T> arrays, std::size_t n) {
  const auto [parameters, gradient, first, second] = arrays;
  POSEIDON_INDEPENDENT_ELEMENTS
  for (std::size_t i = 0; i < n; ++i) {
    T g = scalars.moments.sign * gradient[i];
    if constexpr (decay == Decay::of_gradient) g = fused(scalars.decay, parameters[i], g);
    if constexpr (decay == Decay::of_parameters) parameters[i] *= scalars.decay;
    update_moments(scalars.moments, g, first[i], second[i]);
  }
}

template <typename T>
POSEIDON_INLINE void adam_step(AdamScalars<T> scalars, AdamArrays<T> arrays, const T* roots, std::size_t n) {
  const auto [parameters, gradient, first, second] = arrays;
  POSEIDON_INDEPENDENT_ELEMENTS
  for (std::size_t i = 0; i < n; ++i) {
    const T denominator = roots[i] / scalars.root_divisor + scalars.eps;
    parameters[i] += scalars.negative_step * first[i] / denominator;
  }
}

template <Decay decay, typename T>
void adam_update(Isa isa, const UpdateCall<T>& call) {
#if POSEIDON_X86_DISPATCH
  if constexpr (std::is_same_v<T, float>)
    if (isa == Isa::v4) return adam_update_v4<decay>(call);
#endif
  constexpr std::size_t block = 512;  // how many elements two passes share, so that scratch stays in the L1 cache
  const AdamScalars<T> scalars(call, decay);
  alignas(64) std::array<T, block> scratch{};
  T* const roots = scratch.data();
  for (std::size_t begin = 0; begin < call.parameters.size(); begin += block) {
    const std::size_t n = std::min(block, call.parameters.size() - begin);
    const AdamArrays<T> arrays{call.parameters.data() + begin, call.gradient.data() + begin,
                               call.states[0].data() + begin, call.states[1].data() + begin};
    run_with(
        isa, [=](auto) __attribute__((always_inline)) { adam_moments<decay>(scalars, arrays, n); });
    square_root(isa, arrays.second, roots, n);
    run_with(
        isa, [=](auto) __attribute__((always_inline)) { adam_step(scalars, arrays, roots, n); });
  }
}

/// `decay` says where weight decay is applied, if it is.
template <Decay decay, typename T>
void adam(Isa isa, const UpdateCall<T>& call) {
  if (call.values[kWeightDecay] == 0) return adam_update<Decay::none>(isa, call);
  adam_update<decay>(isa, call);
}

/// Returns a kind that keeps exp_avg and exp_avg_sq.
template <Decay decay>
BuiltInRule adam_rule(const char* name) {
  UpdateKind kind;
  kind.name = name;
  kind.values = moments_values(1e-8, decay == Decay::of_parameters ? 1e-2 : 0);
  kind.state_count = [](std::span<const double>) { return std::size_t{2}; };
  return {std::move(kind), adam<decay, float>, adam<decay, double>};
}

}  // namespace poseidon::kernel
