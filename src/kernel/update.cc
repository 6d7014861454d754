#include "kernel/update.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>

#include "kernel/square_root.h"

namespace poseidon::kernel {
namespace {

// Elements between two passes over scratch in the L1 cache.
constexpr std::size_t kBlock = 512;

POSEIDON_INLINE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
POSEIDON_INLINE double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }

template <typename Function>
void with_floating_type(DType dtype, const Function& function) {
  if (dtype == DType::float32) return function(float{});
  if (dtype == DType::float64) return function(double{});
}

/// Turns a flag into a type, so that each loop is compiled without branches.
template <typename Function>
void with_flag(bool flag, const Function& function) {
  if (flag) return function(std::true_type{});
  function(std::false_type{});
}

template <typename T>
struct SgdScalars {
  explicit SgdScalars(const UpdateRule& rule)
      : sign(rule.maximize ? T{-1} : T{1}),
        weight_decay(static_cast<T>(rule.weight_decay)),
        momentum(static_cast<T>(rule.momentum)),
        gradient_share(static_cast<T>(1 - rule.dampening)),
        negative_lr(static_cast<T>(-rule.lr)) {}

  T sign, weight_decay, momentum, gradient_share, negative_lr;
};

enum class Momentum { none, first_step, later_step };

template <Momentum momentum, bool decays, bool nesterov, typename T>
POSEIDON_INLINE void sgd_loop(SgdScalars<T> scalars, T* parameters, const T* gradient, T* buffer, std::size_t n) {
  const auto [sign, weight_decay, mu, gradient_share, negative_lr] = scalars;
  POSEIDON_INDEPENDENT_ELEMENTS
  for (std::size_t i = 0; i < n; ++i) {
    T g = sign * gradient[i];
    if constexpr (decays) g = fused(weight_decay, parameters[i], g);
    if constexpr (momentum != Momentum::none) {
      const T b = momentum == Momentum::first_step ? g : fused(gradient_share, g, buffer[i] * mu);
      buffer[i] = b;
      g = nesterov ? fused(mu, b, g) : b;
    }
    parameters[i] = fused(negative_lr, g, parameters[i]);
  }
}

template <Momentum momentum, typename T>
void sgd(Isa isa, const UpdateRule& rule, T* parameters, const T* gradient, T* buffer, std::size_t n) {
  const SgdScalars<T> scalars(rule);
  with_flag(rule.weight_decay != 0, [&](auto decays) {
    with_flag(rule.nesterov && momentum != Momentum::none, [&](auto nesterov) {
      run_with(
          isa, [=](auto) __attribute__((always_inline)) {
            sgd_loop<momentum, decltype(decays)::value, decltype(nesterov)::value>(scalars, parameters, gradient,
                                                                                   buffer, n);
          });
    });
  });
}

/// The numbers of one step that Adam and LAMB share.
template <typename T>
struct Moments {
  Moments(const UpdateRule& rule, std::uint64_t step)
      : sign(rule.maximize ? T{-1} : T{1}),
        first_share(static_cast<T>(1 - rule.beta1)),
        // Tensor.lerp starts from the nearer end.
        from_first(std::abs(first_share) < T{0.5}),
        first_factor(from_first ? first_share : first_share - T{1}),
        beta2(static_cast<T>(rule.beta2)),
        second_share(static_cast<T>(1 - rule.beta2)),
        first_correction(1 - std::pow(rule.beta1, static_cast<double>(step))),
        // PyTorch takes the root as a power.
        second_correction_root(std::pow(1 - std::pow(rule.beta2, static_cast<double>(step)), 0.5)) {}

  T sign;
  T first_share;
  bool from_first;
  T first_factor;
  T beta2, second_share;
  double first_correction, second_correction_root;
};

template <typename T>
POSEIDON_INLINE void update_moments(const Moments<T>& moments, T g, T& first, T& second) {
  first = fused(moments.first_factor, g - first, moments.from_first ? first : g);
  second = fused(moments.second_share * g, g, second * moments.beta2);
}

enum class Decay { none, of_gradient, of_parameters };

template <typename T>
struct AdamScalars {
  AdamScalars(const UpdateRule& rule, std::uint64_t step)
      : moments(rule, step),
        decay(static_cast<T>(rule.kind == UpdateKind::adamw ? 1 - rule.lr * rule.weight_decay : rule.weight_decay)),
        root_divisor(static_cast<T>(moments.second_correction_root)),
        eps(static_cast<T>(rule.eps)),
        negative_step(static_cast<T>(-(rule.lr / moments.first_correction))) {}

  Moments<T> moments;
  T decay, root_divisor, eps, negative_step;
};

template <typename T>
struct AdamArrays {
  T* parameters;
  const T* gradient;
  T* first;
  T* second;
};

/// Decays, updates the moments and leaves exp_avg_sq in `roots`.
template <Decay decay, typename T>
POSEIDON_INLINE void adam_moments(AdamScalars<T> scalars, AdamArrays<T> arrays, T* roots, std::size_t n) {
  const auto [parameters, gradient, first, second] = arrays;
  POSEIDON_INDEPENDENT_ELEMENTS
  for (std::size_t i = 0; i < n; ++i) {
    T g = scalars.moments.sign * gradient[i];
    if constexpr (decay == Decay::of_gradient) g = fused(scalars.decay, parameters[i], g);
    if constexpr (decay == Decay::of_parameters) parameters[i] *= scalars.decay;
    update_moments(scalars.moments, g, first[i], second[i]);
    roots[i] = second[i];
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
void adam(Isa isa, const AdamScalars<T>& scalars, const AdamArrays<T>& all, std::size_t element_count) {
  alignas(64) std::array<T, kBlock> scratch{};
  T* const roots = scratch.data();
  for (std::size_t first = 0; first < element_count; first += kBlock) {
    const std::size_t n = std::min(kBlock, element_count - first);
    const AdamArrays<T> arrays{all.parameters + first, all.gradient + first, all.first + first, all.second + first};
    run_with(
        isa, [=](auto) __attribute__((always_inline)) { adam_moments<decay>(scalars, arrays, roots, n); });
    square_root(isa, roots, n);
    run_with(
        isa, [=](auto) __attribute__((always_inline)) { adam_step(scalars, arrays, roots, n); });
  }
}

template <typename T>
T* values(std::byte* array) {
  return reinterpret_cast<T*>(array);
}
template <typename T>
const T* values(const std::byte* array) {
  return reinterpret_cast<const T*>(array);
}

template <typename T>
void update_typed(Isa isa, const UpdateRule& rule, std::uint64_t step, T* parameters, const T* gradient,
                  std::span<std::byte* const> states, std::size_t n) {
  if (rule.kind == UpdateKind::sgd) {
    if (rule.momentum == 0) return sgd<Momentum::none, T>(isa, rule, parameters, gradient, nullptr, n);
    T* const buffer = values<T>(states[0]);
    if (step == 1) return sgd<Momentum::first_step>(isa, rule, parameters, gradient, buffer, n);
    return sgd<Momentum::later_step>(isa, rule, parameters, gradient, buffer, n);
  }
  const AdamScalars<T> scalars(rule, step);
  const AdamArrays<T> arrays{parameters, gradient, values<T>(states[0]), values<T>(states[1])};
  if (rule.weight_decay == 0) return adam<Decay::none>(isa, scalars, arrays, n);
  if (rule.kind == UpdateKind::adamw) return adam<Decay::of_parameters>(isa, scalars, arrays, n);
  adam<Decay::of_gradient>(isa, scalars, arrays, n);
}

// Partial sums of squares: element i belongs to sum i % kLanes whatever the vector width.
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
  LambScalars(const UpdateRule& rule, std::uint64_t step)
      : moments(rule, step),
        first_divisor(static_cast<T>(moments.first_correction)),
        root_divisor(static_cast<T>(moments.second_correction_root)),
        eps(static_cast<T>(rule.eps)),
        weight_decay(static_cast<T>(rule.weight_decay)) {}

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

}  // namespace

void update_with(Isa isa, const UpdateRule& rule, std::uint64_t step, std::byte* parameters, const std::byte* gradient,
                 std::span<std::byte* const> states, std::size_t element_count, DType dtype) {
  with_floating_type(dtype, [&](auto type) {
    using T = decltype(type);
    update_typed<T>(isa, rule, step, values<T>(parameters), values<T>(gradient), states, element_count);
  });
}

LambNorms lamb_direction_with(Isa isa, const UpdateRule& rule, std::uint64_t step, const std::byte* parameters,
                              const std::byte* gradient, std::span<std::byte* const> states, std::byte* direction,
                              std::size_t element_count, DType dtype) {
  Lanes parameter_lanes{};
  Lanes direction_lanes{};
  with_floating_type(dtype, [&](auto type) {
    using T = decltype(type);
    const LambScalars<T> scalars(rule, step);
    for (std::size_t begin = 0; begin < element_count; begin += kBlock) {
      const std::size_t n = std::min(kBlock, element_count - begin);
      const T* const p = values<T>(parameters) + begin;
      const T* const g = values<T>(gradient) + begin;
      T* const d = values<T>(direction) + begin;
      T* const first = values<T>(states[0]) + begin;
      T* const second = values<T>(states[1]) + begin;
      run_with(
          isa, [ =, &parameter_lanes, &direction_lanes ](auto) __attribute__((always_inline)) {
            lamb_loop(scalars, p, g, first, second, d, n);
            add_squares(p, n, parameter_lanes);
            add_squares(d, n, direction_lanes);
          });
    }
  });
  return {total(parameter_lanes), total(direction_lanes)};
}

void lamb_apply_with(Isa isa, const UpdateRule& rule, const LambNorms& norms, std::byte* parameters,
                     const std::byte* direction, std::size_t element_count, DType dtype) {
  const bool scales = norms.parameter_squares > 0 && norms.direction_squares > 0;
  const double ratio = scales ? std::sqrt(norms.parameter_squares) / std::sqrt(norms.direction_squares) : 1;
  with_floating_type(dtype, [&](auto type) {
    using T = decltype(type);
    const auto negative_step = static_cast<T>(-(rule.lr * ratio));
    run_with(
        isa, [ =, p = values<T>(parameters), d = values<T>(direction) ](auto) __attribute__((always_inline)) {
          POSEIDON_INDEPENDENT_ELEMENTS
          for (std::size_t i = 0; i < element_count; ++i) p[i] = fused(negative_step, d[i], p[i]);
        });
  });
}

void update(const UpdateRule& rule, std::uint64_t step, std::byte* parameters, const std::byte* gradient,
            std::span<std::byte* const> states, std::size_t element_count, DType dtype) {
  update_with(best_isa(), rule, step, parameters, gradient, states, element_count, dtype);
}

LambNorms lamb_direction(const UpdateRule& rule, std::uint64_t step, const std::byte* parameters,
                         const std::byte* gradient, std::span<std::byte* const> states, std::byte* direction,
                         std::size_t element_count, DType dtype) {
  return lamb_direction_with(best_isa(), rule, step, parameters, gradient, states, direction, element_count, dtype);
}

void lamb_apply(const UpdateRule& rule, const LambNorms& norms, std::byte* parameters, const std::byte* direction,
                std::size_t element_count, DType dtype) {
  lamb_apply_with(best_isa(), rule, norms, parameters, direction, element_count, dtype);
}

}  // namespace poseidon::kernel
