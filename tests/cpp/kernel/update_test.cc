// The update kernels against torch.optim's formulas written as one scalar chain per element.
#include <gtest/gtest.h>

#include <array>
#include <numeric>

#include "arrays.h"
#include "cpp/kernel/rules.h"
#include "kernel/square_root.h"
#include "kernel/update_rules/built_in.h"

namespace poseidon::kernel {
namespace {

using testing::rule_of;
using testing::value_of;
using testing::with;

/// A rule's values by name. A name that its kind does not have gives 0.
struct Numbers {
  explicit Numbers(const UpdateRule& rule)
      : decouples(rule.kind->name == "adamw"),
        nesterov(value_of(rule, "nesterov") != 0),
        maximize(value_of(rule, "maximize") != 0),
        lr(value_of(rule, "lr")),
        momentum(value_of(rule, "momentum")),
        dampening(value_of(rule, "dampening")),
        beta1(value_of(rule, "beta1")),
        beta2(value_of(rule, "beta2")),
        eps(value_of(rule, "eps")),
        weight_decay(value_of(rule, "weight_decay")) {}
  bool decouples, nesterov, maximize;
  double lr, momentum, dampening, beta1, beta2, eps, weight_decay;
};

/// A parameter and the state of its optimizer.
template <typename T>
struct Element {
  T parameter = 0;
  T first = 0;  // momentum buffer or exp_avg
  T second = 0;
};

template <typename T>
T torch_root(T value) {
  T root = 0;
  square_root(Isa::baseline, &value, &root, 1);
  return root;
}

// _single_tensor_sgd
template <typename T>
void reference_sgd(const Numbers& rule, std::uint64_t step, Element<T>& e, T gradient) {
  T g = rule.maximize ? -gradient : gradient;
  if (rule.weight_decay != 0) g = std::fma(static_cast<T>(rule.weight_decay), e.parameter, g);
  if (rule.momentum != 0) {
    const T decayed = e.first * static_cast<T>(rule.momentum);
    e.first = step == 1 ? g : std::fma(static_cast<T>(1 - rule.dampening), g, decayed);
    g = rule.nesterov ? std::fma(static_cast<T>(rule.momentum), e.first, g) : e.first;
  }
  e.parameter = std::fma(static_cast<T>(-rule.lr), g, e.parameter);
}

// Tensor.lerp, then mul and addcmul
template <typename T>
void reference_moments(const Numbers& rule, Element<T>& e, T g) {
  const T weight = static_cast<T>(1 - rule.beta1);
  const T difference = g - e.first;
  e.first = weight < T{0.5} ? std::fma(weight, difference, e.first) : std::fma(weight - 1, difference, g);
  const T decayed = e.second * static_cast<T>(rule.beta2);
  const T share = static_cast<T>(1 - rule.beta2) * g;
  e.second = std::fma(share, g, decayed);
}

// _single_tensor_adam
template <typename T>
void reference_adam(const Numbers& rule, std::uint64_t step, Element<T>& e, T gradient) {
  T g = rule.maximize ? -gradient : gradient;
  if (rule.weight_decay != 0) {
    if (rule.decouples) {
      e.parameter = e.parameter * static_cast<T>(1 - rule.lr * rule.weight_decay);
    } else {
      g = std::fma(static_cast<T>(rule.weight_decay), e.parameter, g);
    }
  }
  reference_moments(rule, e, g);
  const double correction1 = 1 - std::pow(rule.beta1, static_cast<double>(step));
  const double correction2 = 1 - std::pow(rule.beta2, static_cast<double>(step));
  const T scaled_root = torch_root(e.second) / static_cast<T>(std::pow(correction2, 0.5));
  const T denominator = scaled_root + static_cast<T>(rule.eps);
  const T numerator = static_cast<T>(-(rule.lr / correction1)) * e.first;
  const T change = numerator / denominator;
  e.parameter = e.parameter + change;
}

// You et al. 2020, Algorithm 2
template <typename T>
T reference_lamb_direction(const Numbers& rule, std::uint64_t step, Element<T>& e, T gradient) {
  reference_moments(rule, e, rule.maximize ? -gradient : gradient);
  const double correction1 = 1 - std::pow(rule.beta1, static_cast<double>(step));
  const double correction2 = 1 - std::pow(rule.beta2, static_cast<double>(step));
  const T mean = e.first / static_cast<T>(correction1);
  const T scaled_root = std::sqrt(e.second) / static_cast<T>(std::pow(correction2, 0.5));
  const T ratio = mean / (scaled_root + static_cast<T>(rule.eps));
  return std::fma(static_cast<T>(rule.weight_decay), e.parameter, ratio);
}

/// Values of very different magnitudes, some of them zero.
template <typename T>
std::vector<T> wild_values(std::mt19937& random, std::size_t n) {
  std::normal_distribution<double> normal;
  std::vector<T> values(n);
  for (T& value : values)
    value = random() % 16 == 0 ? T{0} : static_cast<T>(normal(random) * std::exp(4 * normal(random)));
  return values;
}

template <typename T>
struct Arrays {
  std::vector<T> parameters, first, second;

  Arrays(std::mt19937& random, std::size_t n) : parameters(wild_values<T>(random, n)), first(n), second(n) {}
  /// Updates `count` elements from `begin` on.
  UpdateCall<T> call(const UpdateRule& rule, std::uint64_t step, const std::vector<T>& gradient, std::size_t begin,
                     std::size_t count) {
    UpdateCall<T> call;
    call.parameters = std::span(parameters).subspan(begin, count);
    call.gradient = std::span(gradient).subspan(begin, count);
    call.states[0] = std::span(first).subspan(begin, count);
    call.states[1] = std::span(second).subspan(begin, count);
    call.update_count = step;
    call.values = rule.values;
    return call;
  }
  Element<T> element(std::size_t i) const { return {parameters[i], first[i], second[i]}; }
  void set(std::size_t i, const Element<T>& e) {
    parameters[i] = e.parameter, first[i] = e.first, second[i] = e.second;
  }
  bool operator==(const Arrays&) const = default;
};

UpdateRule sgd_rule(double momentum, double dampening, bool nesterov) {
  return rule_of("sgd",
                 {{"lr", 0.1}, {"momentum", momentum}, {"dampening", dampening}, {"nesterov", nesterov ? 1 : 0}});
}

UpdateRule adam_rule(const std::string& kind, double beta1) {
  return rule_of(kind, {{"lr", 3e-3}, {"beta1", beta1}, {"beta2", 0.999}, {"eps", 1e-8}});
}

/// One update of the rule with the instruction set.
template <typename T>
void update_with(Isa isa, const UpdateRule& rule, const UpdateCall<T>& call) {
  for (const BuiltInRule& known : built_in_rules()) {
    if (known.kind.name != rule.kind->name) continue;
    if constexpr (sizeof(T) == 4) return known.update_float32(isa, call);
    if constexpr (sizeof(T) == 8) return known.update_float64(isa, call);
  }
  FAIL() << rule.kind->name;
}

/// Every rule with and without weight decay and maximization.
std::vector<UpdateRule> all_rules() {
  std::vector<UpdateRule> rules;
  for (const UpdateRule& rule :
       {sgd_rule(0, 0, false), sgd_rule(0.9, 0, false), sgd_rule(0.9, 0.2, false), sgd_rule(0.9, 0, true),
        adam_rule("adam", 0.9), adam_rule("adam", 0.4), adam_rule("adamw", 0.9), adam_rule("adamw", 0.4)}) {
    for (const double weight_decay : {0., 0.01}) {
      for (const bool maximize : {false, true}) {
        rules.push_back(with(with(rule, "weight_decay", weight_decay), "maximize", maximize ? 1 : 0));
      }
    }
  }
  return rules;
}

template <typename T>
class Update : public ::testing::Test {};
using Types = ::testing::Types<float, double>;
TYPED_TEST_SUITE(Update, Types);

TYPED_TEST(Update, HasTheBitsOfTorchsFormulas) {
  using T = TypeParam;
  for (const std::size_t n : {0, 1, 7, 16, 33, 511, 1300}) {
    for (const UpdateRule& rule : all_rules()) {
      const Numbers numbers(rule);
      for (const Isa isa : available_isas()) {
        std::mt19937 random(41);
        Arrays<T> actual(random, n);
        Arrays<T> expected = actual;
        for (std::uint64_t step = 1; step <= 5; ++step) {
          const std::vector<T> gradient = wild_values<T>(random, n);
          update_with(isa, rule, actual.call(rule, step, gradient, 0, n));
          for (std::size_t i = 0; i < n; ++i) {
            Element<T> e = expected.element(i);
            const auto reference = rule.kind->name == "sgd" ? reference_sgd<T> : reference_adam<T>;
            reference(numbers, step, e, gradient[i]);
            expected.set(i, e);
          }
          ASSERT_EQ(actual, expected) << "kind " << rule.kind->name << ", step " << step << ", " << n;
        }
      }
    }
  }
}

TYPED_TEST(Update, DoesNotDependOnTheSlices) {
  using T = TypeParam;
  constexpr std::size_t n = 2000;
  for (const UpdateRule& rule : all_rules()) {
    std::mt19937 random(42);
    Arrays<T> whole(random, n);
    Arrays<T> sliced = whole;
    for (std::uint64_t step = 1; step <= 3; ++step) {
      const std::vector<T> gradient = wild_values<T>(random, n);
      update_with(best_isa(), rule, whole.call(rule, step, gradient, 0, n));
      for (std::size_t begin = 0, count = 1; begin < n; begin += count, count = count * 2 + 1) {
        count = std::min(count, n - begin);
        update_with(best_isa(), rule, sliced.call(rule, step, gradient, begin, count));
      }
    }
    EXPECT_EQ(sliced, whole) << "kind " << rule.kind->name;
  }
}

TYPED_TEST(Update, LambEqualsItsReference) {
  using T = TypeParam;
  const UpdateRule rule = with(adam_rule("lamb", 0.9), "weight_decay", 0.01);
  const Numbers numbers(rule);
  for (const std::size_t n : {1, 15, 16, 600, 3001}) {
    for (const Isa isa : available_isas()) {
      std::mt19937 random(43);
      Arrays<T> actual(random, n);
      Arrays<T> expected = actual;
      std::vector<T> direction(n);
      for (std::uint64_t step = 1; step <= 4; ++step) {
        const std::vector<T> gradient = wild_values<T>(random, n);
        UpdateCall<T> call = actual.call(rule, step, gradient, 0, n);
        call.scratch = direction;
        const LambNorms norms = lamb_direction(isa, call);
        std::array<double, 16> parameter_squares{};
        std::array<double, 16> direction_squares{};
        for (std::size_t i = 0; i < n; ++i) {
          Element<T> e = expected.element(i);
          ASSERT_EQ(direction[i], reference_lamb_direction(numbers, step, e, gradient[i]));
          expected.set(i, e);
          parameter_squares[i % 16] += static_cast<double>(e.parameter) * e.parameter;
          direction_squares[i % 16] += static_cast<double>(direction[i]) * direction[i];
        }
        ASSERT_EQ(norms.parameter_squares, std::accumulate(parameter_squares.begin(), parameter_squares.end(), 0.));
        ASSERT_EQ(norms.direction_squares, std::accumulate(direction_squares.begin(), direction_squares.end(), 0.));
        lamb_apply(isa, norms, call);
        const double ratio = std::sqrt(norms.parameter_squares) / std::sqrt(norms.direction_squares);
        for (std::size_t i = 0; i < n; ++i) {
          T& parameter = expected.parameters[i];
          parameter = std::fma(static_cast<T>(-(numbers.lr * ratio)), direction[i], parameter);
        }
        ASSERT_EQ(actual, expected) << n << " elements, step " << step;
      }
    }
  }
}

TYPED_TEST(Update, LambDoesNotScaleAZeroLayer) {
  using T = TypeParam;
  const UpdateRule rule = adam_rule("lamb", 0.9);
  std::vector<T> parameters(3, T{0});
  std::vector<T> direction(3, T{2});
  UpdateCall<T> call;
  call.parameters = parameters;
  call.scratch = direction;
  call.values = rule.values;
  lamb_apply(best_isa(), {0, 12}, call);
  EXPECT_EQ(parameters[2], static_cast<T>(-Numbers(rule).lr) * 2);
}

}  // namespace
}  // namespace poseidon::kernel
