// UpdateRule: how a server turns a step's mean gradient into new parameters (Parameter Hub §3.2.2).
#pragma once

#include <cstddef>
#include <cstdint>

namespace poseidon {

/// Which optimizer the server runs.
enum class UpdateKind : std::uint8_t {
  none = 0,   // the server returns the reduced gradient
  sgd = 1,    // with momentum, dampening, Nesterov
  adam = 2,   // weight decay added to the gradient
  adamw = 3,  // weight decay decoupled from it
  lamb = 4,   // adamw's direction, scaled by the ratio of the layer's norms; the layer lies whole on one shard
};

/// The hyperparameters of one step, under the names of PyTorch's optimizers. The number of the update
/// (Adam's bias correction) is counted by who holds the state.
struct UpdateRule {
  UpdateKind kind = UpdateKind::none;
  bool nesterov = false;
  bool maximize = false;
  double lr = 0;
  double momentum = 0;
  double dampening = 0;
  double beta1 = 0;
  double beta2 = 0;
  double eps = 0;
  double weight_decay = 0;
  bool keeps_gradient = false;  // the mean gradient of each update is kept until the next, as array kGradientArray

  bool operator==(const UpdateRule&) const = default;
};

/// What `Client::pull` calls the mean gradient of the last update, where the rule keeps it.
inline constexpr std::uint32_t kGradientArray = 3;

/// Arrays of the parameter's size that the rule keeps from step to step: SGD with momentum has
/// one (the momentum buffer), Adam and its kin two (exp_avg, exp_avg_sq).
constexpr std::size_t update_state_count(const UpdateRule& rule) {
  switch (rule.kind) {
    case UpdateKind::none:
      return 0;
    case UpdateKind::sgd:
      return rule.momentum != 0 ? 1 : 0;
    case UpdateKind::adam:
    case UpdateKind::adamw:
    case UpdateKind::lamb:
      return 2;
  }
  return 0;
}

}  // namespace poseidon
