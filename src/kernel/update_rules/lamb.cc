// lamb: Adam's direction with decoupled weight decay, scaled by the ratio of the layer's norms (You et al. 2020).
#include <algorithm>
#include <array>
#include <cmath>

#include "kernel/square_root.h"
#include "kernel/update_rules/moments.h"

namespace poseidon::kernel {

namespace {

// How many elements one pass processes. What it reads and writes stays in the L1 cache for the sums of squares.
constexpr std::size_t kBlock = 512;
// The number of partial sums of squares. Element i belongs to sum i % kLanes, whatever the vector width is.
constexpr std::size_t kLanes = 16;
using Lanes = std::array<double, kLanes>;

template <typename T>
POSEIDON_INLINE void add_squares(const T* in, std::size_t n, Lanes& lanes) {
  std::size_t first = 0;
  for (; first + kLanes <= n; first += kLanes) {
    for (std::size_t j = 0; j < kLanes; ++j) {
      const auto value = static_cast<double>(in[first + j]);
      lanes[j] += value * value;
    }
  }
  for (std::size_t j = 0; first + j < n; ++j) lanes[j] += static_cast<double>(in[first + j]) * in[first + j];
}

double total(const Lanes& lanes) {
  double result = 0;
  for (const double lane : lanes) result += lane;
  return result;
}

template <typename T>
struct LambScalars {
  explicit LambScalars(const UpdateCall<T>& call)
      : moments(call),
        first_divisor(static_cast<T>(moments.first_correction)),
        root_divisor(static_cast<T>(moments.second_correction_root)),
        eps(static_cast<T>(call.values[kEps])),
        weight_decay(static_cast<T>(call.values[kWeightDecay])) {}

  Moments<T> moments;
  T first_divisor, root_divisor, eps, weight_decay;
};

template <typename T>
POSEIDON_INLINE void lamb_loop(LambScalars<T> scalars, const T* parameters, const T* gradient, T* first, T* second,
                               T* direction, std::size_t n) {
  POSEIDON_INDEPENDENT_ELEMENTS
  for (std::size_t i = 0; i < n; ++i) {
    update_moments(scalars.moments, scalars.moments.sign * gradient[i], first[i], second[i]);
    const T denominator = ieee_root(second[i]) / scalars.root_divisor + scalars.eps;
    const T ratio = (first[i] / scalars.first_divisor) / denominator;
    direction[i] = fused(scalars.weight_decay, parameters[i], ratio);
  }
}

template <typename T>
void update_lamb(Isa isa, const UpdateCall<T>& call) {
  lamb_apply(isa, lamb_direction(isa, call), call);
}

}  // namespace

template <typename T>
LambNorms lamb_direction(Isa isa, const UpdateCall<T>& call) {
  Lanes parameter_lanes{};
  Lanes direction_lanes{};
  const LambScalars<T> scalars(call);
  for (std::size_t begin = 0; begin < call.parameters.size(); begin += kBlock) {
    const std::size_t n = std::min(kBlock, call.parameters.size() - begin);
    const T* const p = call.parameters.data() + begin;
    const T* const g = call.gradient.data() + begin;
    T* const d = call.scratch.data() + begin;
    T* const first = call.states[0].data() + begin;
    T* const second = call.states[1].data() + begin;
    run_with(
        isa, [ =, &parameter_lanes, &direction_lanes ](auto) __attribute__((always_inline)) {
          lamb_loop(scalars, p, g, first, second, d, n);
          add_squares(p, n, parameter_lanes);
          add_squares(d, n, direction_lanes);
        });
  }
  return {total(parameter_lanes), total(direction_lanes)};
}

template <typename T>
void lamb_apply(Isa isa, const LambNorms& norms, const UpdateCall<T>& call) {
  const bool scales = norms.parameter_squares > 0 && norms.direction_squares > 0;
  const double ratio = scales ? std::sqrt(norms.parameter_squares) / std::sqrt(norms.direction_squares) : 1;
  const auto negative_step = static_cast<T>(-(call.values[kLr] * ratio));
  run_with(
      isa, [ =, p = call.parameters.data(), d = call.scratch.data(), n = call.parameters.size() ](auto)
               __attribute__((always_inline)) {
                 POSEIDON_INDEPENDENT_ELEMENTS
                 for (std::size_t i = 0; i < n; ++i) p[i] = fused(negative_step, d[i], p[i]);
               });
}

template LambNorms lamb_direction(Isa isa, const UpdateCall<float>& call);
template LambNorms lamb_direction(Isa isa, const UpdateCall<double>& call);
template void lamb_apply(Isa isa, const LambNorms& norms, const UpdateCall<float>& call);
template void lamb_apply(Isa isa, const LambNorms& norms, const UpdateCall<double>& call);

BuiltInRule lamb() {
  UpdateKind kind;
  kind.name = "lamb";
  kind.values = moments_values(1e-6, 0);
  kind.state_count = [](std::span<const double>) { return std::size_t{2}; };  // exp_avg and exp_avg_sq
  kind.whole_layer = true;
  kind.needs_scratch = true;
  return {std::move(kind), update_lamb<float>, update_lamb<double>};
}

}  // namespace poseidon::kernel
