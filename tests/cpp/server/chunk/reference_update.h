// Parameters that are updated as whole arrays. The tests compare them with what servers compute for their chunks.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cpp/kernel/rules.h"
#include "cpp/server/chunk/contributions.h"

namespace poseidon::testing {

/// Returns one rule of every kind, with all its options.
inline std::vector<UpdateRule> update_rules() {
  const std::vector<std::pair<std::string, double>> moments{
      {"lr", 0.01}, {"beta1", 0.9}, {"beta2", 0.999}, {"eps", 1e-8}, {"weight_decay", 0.1}};
  return {rule_of("sgd", {{"lr", 0.1}}),
          rule_of("sgd", {{"lr", 0.1}, {"momentum", 0.9}, {"weight_decay", 0.01}, {"nesterov", 1}}),
          rule_of("sgd", {{"lr", 0.1}, {"momentum", 0.8}, {"dampening", 0.3}, {"maximize", 1}}),
          rule_of("adam", moments),
          rule_of("adamw", moments),
          with(rule_of("lamb", moments), "eps", 1e-6)};
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
    if (dtype == DType::float64) return update_typed(rule, rule.kind->update_float64, gradient);
    update_typed(rule, rule.kind->update_float32, gradient);
  }

  Bytes value;
  DType dtype;
  std::vector<Bytes> states;
  std::uint64_t update_count = 0;

 private:
  template <typename T>
  void update_typed(const UpdateRule& rule, const std::function<void(const UpdateCall<T>&)>& function,
                    const Bytes& gradient) {
    states.resize(update_state_count(rule), Bytes(value.size()));
    Bytes scratch(value.size());
    UpdateCall<T> call;
    call.parameters = elements<T>(value);
    call.gradient = {reinterpret_cast<const T*>(gradient.data()), gradient.size() / sizeof(T)};
    for (std::size_t i = 0; i < states.size(); ++i) call.states[i] = elements<T>(states[i]);
    call.scratch = elements<T>(scratch);
    call.update_count = ++update_count;
    call.values = rule.values;
    function(call);
  }
  template <typename T>
  static std::span<T> elements(Bytes& bytes) {
    return {reinterpret_cast<T*>(bytes.data()), bytes.size() / sizeof(T)};
  }
};

}  // namespace poseidon::testing
