// The update kernels against torch.optim's formulas written as one scalar chain per element.
#include "kernel/update.h"

#include <gtest/gtest.h>

#include <array>
#include <numeric>

#include "arrays.h"
#include "kernel/square_root.h"

namespace poseidon::kernel {
namespace {

/// A parameter and what its optimizer keeps.
template <typename T>
struct Element {
  T parameter = 0;
  T first = 0;  // momentum buffer or exp_avg
  T second = 0;
};

template <typename T>
T torch_root(T value) {
  square_root(Isa::baseline, &value, 1);
  return value;
}

// _single_tensor_sgd
template <typename T>
void reference_sgd(const UpdateRule& rule, std::uint64_t step, Element<T>& e, T gradient) {
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
void reference_moments(const UpdateRule& rule, Element<T>& e, T g) {
  const T weight = static_cast<T>(1 - rule.beta1);
  const T difference = g - e.first;
  e.first = weight < T{0.5} ? std::fma(weight, difference, e.first) : std::fma(weight - 1, difference, g);
  const T decayed = e.second * static_cast<T>(rule.beta2);
  const T share = static_cast<T>(1 - rule.beta2) * g;
  e.second = std::fma(share, g, decayed);
}

// _single_tensor_adam
template <typename T>
void reference_adam(const UpdateRule& rule, std::uint64_t step, Element<T>& e, T gradient) {
  T g = rule.maximize ? -gradient : gradient;
  if (rule.weight_decay != 0) {
    if (rule.kind == UpdateKind::adamw) {
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
T reference_lamb_direction(const UpdateRule& rule, std::uint64_t step, Element<T>& e, T gradient) {
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
std::byte* bytes(std::vector<T>& values) {
  return reinterpret_cast<std::byte*>(values.data());
}
template <typename T>
const std::byte* bytes(const std::vector<T>& values) {
  return reinterpret_cast<const std::byte*>(values.data());
}

template <typename T>
struct Arrays {
  std::vector<T> parameters, first, second;

  Arrays(std::mt19937& random, std::size_t n) : parameters(wild_values<T>(random, n)), first(n), second(n) {}
  std::array<std::byte*, 2> states(std::size_t begin = 0) {
    return {bytes(first) + begin * sizeof(T), bytes(second) + begin * sizeof(T)};
  }
  Element<T> element(std::size_t i) const { return {parameters[i], first[i], second[i]}; }
  void set(std::size_t i, const Element<T>& e) {
    parameters[i] = e.parameter, first[i] = e.first, second[i] = e.second;
  }
  bool operator==(const Arrays&) const = default;
};

UpdateRule sgd_rule(double momentum, double dampening, bool nesterov) {
  UpdateRule rule;
  rule.kind = UpdateKind::sgd;
  rule.lr = 0.1;
  rule.momentum = momentum;
  rule.dampening = dampening;
  rule.nesterov = nesterov;
  return rule;
}

UpdateRule adam_rule(UpdateKind kind, double beta1) {
  UpdateRule rule;
  rule.kind = kind;
  rule.lr = 3e-3;
  rule.beta1 = beta1;
  rule.beta2 = 0.999;
  rule.eps = 1e-8;
  return rule;
}

/// Every rule with and without weight decay and maximization.
std::vector<UpdateRule> all_rules() {
  std::vector<UpdateRule> rules;
  for (UpdateRule rule : {sgd_rule(0, 0, false), sgd_rule(0.9, 0, false), sgd_rule(0.9, 0.2, false),
                          sgd_rule(0.9, 0, true), adam_rule(UpdateKind::adam, 0.9), adam_rule(UpdateKind::adam, 0.4),
                          adam_rule(UpdateKind::adamw, 0.9), adam_rule(UpdateKind::adamw, 0.4)}) {
    for (const double weight_decay : {0., 0.01}) {
      for (const bool maximize : {false, true}) {
        rule.weight_decay = weight_decay;
        rule.maximize = maximize;
        rules.push_back(rule);
      }
    }
  }
  return rules;
}

template <typename T>
class Update : public testing::Test {
 public:
  static constexpr DType kDType = sizeof(T) == 4 ? DType::float32 : DType::float64;
};
using Types = testing::Types<float, double>;
TYPED_TEST_SUITE(Update, Types);

TYPED_TEST(Update, HasTheBitsOfTorchsFormulas) {
  using T = TypeParam;
  for (const std::size_t n : {0, 1, 7, 16, 33, 511, 1300}) {
    for (const UpdateRule& rule : all_rules()) {
      for (const Isa isa : available_isas()) {
        std::mt19937 random(41);
        Arrays<T> actual(random, n);
        Arrays<T> expected = actual;
        for (std::uint64_t step = 1; step <= 5; ++step) {
          const std::vector<T> gradient = wild_values<T>(random, n);
          const auto states = actual.states();
          update_with(isa, rule, step, bytes(actual.parameters), bytes(gradient), states, n, this->kDType);
          for (std::size_t i = 0; i < n; ++i) {
            Element<T> e = expected.element(i);
            const auto reference = rule.kind == UpdateKind::sgd ? reference_sgd<T> : reference_adam<T>;
            reference(rule, step, e, gradient[i]);
            expected.set(i, e);
          }
          ASSERT_EQ(actual, expected) << "kind " << static_cast<int>(rule.kind) << ", step " << step << ", " << n;
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
      update(rule, step, bytes(whole.parameters), bytes(gradient), whole.states(), n, this->kDType);
      for (std::size_t begin = 0, count = 1; begin < n; begin += count, count = count * 2 + 1) {
        count = std::min(count, n - begin);
        update(rule, step, bytes(sliced.parameters) + begin * sizeof(T), bytes(gradient) + begin * sizeof(T),
               sliced.states(begin), count, this->kDType);
      }
    }
    EXPECT_EQ(sliced, whole) << "kind " << static_cast<int>(rule.kind);
  }
}

TYPED_TEST(Update, LambEqualsItsReference) {
  using T = TypeParam;
  UpdateRule rule = adam_rule(UpdateKind::lamb, 0.9);
  rule.weight_decay = 0.01;
  for (const std::size_t n : {1, 15, 16, 600, 3001}) {
    for (const Isa isa : available_isas()) {
      std::mt19937 random(43);
      Arrays<T> actual(random, n);
      Arrays<T> expected = actual;
      std::vector<T> direction(n);
      for (std::uint64_t step = 1; step <= 4; ++step) {
        const std::vector<T> gradient = wild_values<T>(random, n);
        const LambNorms norms = lamb_direction_with(isa, rule, step, bytes(actual.parameters), bytes(gradient),
                                                    actual.states(), bytes(direction), n, this->kDType);
        std::array<double, 16> parameter_squares{};
        std::array<double, 16> direction_squares{};
        for (std::size_t i = 0; i < n; ++i) {
          Element<T> e = expected.element(i);
          ASSERT_EQ(direction[i], reference_lamb_direction(rule, step, e, gradient[i]));
          expected.set(i, e);
          parameter_squares[i % 16] += static_cast<double>(e.parameter) * e.parameter;
          direction_squares[i % 16] += static_cast<double>(direction[i]) * direction[i];
        }
        ASSERT_EQ(norms.parameter_squares, std::accumulate(parameter_squares.begin(), parameter_squares.end(), 0.));
        ASSERT_EQ(norms.direction_squares, std::accumulate(direction_squares.begin(), direction_squares.end(), 0.));
        lamb_apply_with(isa, rule, norms, bytes(actual.parameters), bytes(direction), n, this->kDType);
        const double ratio = std::sqrt(norms.parameter_squares) / std::sqrt(norms.direction_squares);
        for (std::size_t i = 0; i < n; ++i) {
          T& parameter = expected.parameters[i];
          parameter = std::fma(static_cast<T>(-(rule.lr * ratio)), direction[i], parameter);
        }
        ASSERT_EQ(actual, expected) << n << " elements, step " << step;
      }
    }
  }
}

TYPED_TEST(Update, LambDoesNotScaleAZeroLayer) {
  using T = TypeParam;
  const UpdateRule rule = adam_rule(UpdateKind::lamb, 0.9);
  std::vector<T> parameters(3, T{0});
  const std::vector<T> direction(3, T{2});
  lamb_apply(rule, {0, 12}, bytes(parameters), bytes(direction), 3, this->kDType);
  EXPECT_EQ(parameters[2], static_cast<T>(-rule.lr) * 2);
}

}  // namespace
}  // namespace poseidon::kernel
