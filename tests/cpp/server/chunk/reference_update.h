// Parameters that are updated as whole arrays, for comparison with what servers make of their chunks.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "cpp/server/chunk/contributions.h"
#include "kernel/update.h"

namespace poseidon::testing {

/// One rule of every kind, with all that it can have.
inline std::vector<UpdateRule> update_rules() {
  UpdateRule sgd;
  sgd.kind = UpdateKind::sgd;
  sgd.lr = 0.1;
  UpdateRule momentum = sgd;
  momentum.momentum = 0.9;
  momentum.weight_decay = 0.01;
  momentum.nesterov = true;
  UpdateRule damped = sgd;
  damped.momentum = 0.8;
  damped.dampening = 0.3;
  damped.maximize = true;
  UpdateRule adam;
  adam.kind = UpdateKind::adam;
  adam.lr = 0.01;
  adam.beta1 = 0.9;
  adam.beta2 = 0.999;
  adam.eps = 1e-8;
  adam.weight_decay = 0.1;
  UpdateRule adamw = adam;
  adamw.kind = UpdateKind::adamw;
  UpdateRule lamb = adam;
  lamb.kind = UpdateKind::lamb;
  lamb.eps = 1e-6;
  return {sgd, momentum, damped, adam, adamw, lamb};
}

inline Bytes random_reals(std::mt19937& random, DType dtype, std::size_t element_count) {
  std::normal_distribution<double> normal;
  std::vector<double> wide(element_count);
  for (double& value : wide) value = normal(random);
  if (dtype == DType::float64) return bytes_of(wide);
  return bytes_of(Floats(wide.begin(), wide.end()));
}

class ReferenceParameters {
 public:
  ReferenceParameters(Bytes values, DType of) : value(std::move(values)), dtype(of) {}

  void update(const UpdateRule& rule, const Bytes& gradient) {
    states.resize(update_state_count(rule), Bytes(value.size()));
    std::vector<std::byte*> places;
    for (Bytes& state : states) places.push_back(state.data());
    const std::size_t element_count = value.size() / dtype_bytes(dtype);
    ++update_count;
    if (rule.kind != UpdateKind::lamb)
      return kernel::update(rule, update_count, value.data(), gradient.data(), places, element_count, dtype);
    Bytes direction(value.size());
    const auto norms = kernel::lamb_direction(rule, update_count, value.data(), gradient.data(), places,
                                              direction.data(), element_count, dtype);
    kernel::lamb_apply(rule, norms, value.data(), direction.data(), element_count, dtype);
  }

  Bytes value;
  DType dtype;
  std::vector<Bytes> states;
  std::uint64_t update_count = 0;
};

}  // namespace poseidon::testing
