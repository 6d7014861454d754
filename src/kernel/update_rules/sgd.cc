// sgd: stochastic gradient descent with momentum, dampening, Nesterov and weight decay, as in torch.optim.SGD.
#include "kernel/update_rules/built_in.h"

namespace poseidon::kernel {

namespace {

enum Value : std::size_t { kLr, kMomentum, kDampening, kWeightDecay, kNesterov, kMaximize };

template <typename T>
struct SgdScalars {
  explicit SgdScalars(std::span<const double> values)
      : sign(values[kMaximize] != 0 ? T{-1} : T{1}),
        weight_decay(static_cast<T>(values[kWeightDecay])),
        momentum(static_cast<T>(values[kMomentum])),
        gradient_share(static_cast<T>(1 - values[kDampening])),
        negative_lr(static_cast<T>(-values[kLr])) {}

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

/// Turns a flag into a type, so that each loop is compiled without branches.
template <typename Function>
void with_flag(bool flag, const Function& function) {
  if (flag) return function(std::true_type{});
  function(std::false_type{});
}

template <Momentum momentum, typename T>
void sgd_with(Isa isa, const UpdateCall<T>& call) {
  const SgdScalars<T> scalars(call.values);
  with_flag(call.values[kWeightDecay] != 0, [&](auto decays) {
    with_flag(call.values[kNesterov] != 0 && momentum != Momentum::none, [&](auto nesterov) {
      run_with(
          isa, [
            =, parameters = call.parameters.data(), gradient = call.gradient.data(), buffer = call.states[0].data(),
            n = call.parameters.size()
          ](auto) __attribute__((always_inline)) {
            sgd_loop<momentum, decltype(decays)::value, decltype(nesterov)::value>(scalars, parameters, gradient,
                                                                                   buffer, n);
          });
    });
  });
}

/// In the first step the momentum buffer becomes the gradient.
template <typename T>
void update_sgd(Isa isa, const UpdateCall<T>& call) {
  if (call.values[kMomentum] == 0) return sgd_with<Momentum::none>(isa, call);
  if (call.update_count == 1) return sgd_with<Momentum::first_step>(isa, call);
  sgd_with<Momentum::later_step>(isa, call);
}

}  // namespace

BuiltInRule sgd() {
  UpdateKind kind;
  kind.name = "sgd";
  kind.values = {number("lr", 1e-3),        number("momentum", 0), number("dampening", 0),
                 number("weight_decay", 0), flag("nesterov"),      flag("maximize")};
  kind.takes_parts = true;
  // One state: the momentum buffer.
  kind.state_count = [](std::span<const double> values) { return std::size_t{values[kMomentum] != 0 ? 1U : 0U}; };
  return {std::move(kind), update_sgd<float>, update_sgd<double>};
}

}  // namespace poseidon::kernel
