// A training with gradients that are whole numbers. Sums are exact in any order, so every bit is known.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "poseidon/plan.h"

namespace poseidon::testing {

/// One layer of the model.
struct SimulatedLayer {
  Layer layer;
  std::uint32_t divisor = 1;      // a power of two: dividing stays exact
  std::size_t factor_count = 0;   // K of each rank's factors; 0: a dense gradient, or rows
  bool sometimes_absent = false;  // absent on some ranks in some steps
};

/// A model with layers of all kinds and of odd sizes: chunked, factored, with few rows, with a changing scheme,
/// compressed, grouped, divided, sometimes absent.
const std::vector<SimulatedLayer>& simulated_model();
/// The layers for Client::add_layers.
std::vector<Layer> model_layers();

/// The contribution of one slot to a layer in a step.
struct SimulatedGradient {
  bool absent = false;
  bool as_factors = false;  // if the layer's scheme takes factors
  bool as_rows = false;     // if it takes rows
  std::vector<float> dense;
  // Where the layer has row gradients: the rows of `dense` that are given, the others are zeros.
  std::vector<std::uint32_t> row_indexes;
  std::vector<float> row_values;
  // Where the layer has factors: K×M and K×N, row-major; `dense` is their product.
  std::vector<float> left;
  std::vector<float> right;
};
SimulatedGradient gradient_of(std::uint64_t seed, int slot, std::uint64_t step, std::size_t layer);

/// The parameters of all layers, and the steps that made them. A step is committed as a whole or not at all.
struct TrainingState {
  std::vector<std::vector<float>> parameters;
  std::vector<std::uint32_t> members;  // the slots of each committed step, one bit each

  std::uint64_t committed() const { return members.size(); }
};

/// The parameters before the first step.
TrainingState initial_state(std::uint64_t seed);
using StepResults = std::vector<std::vector<float>>;  // by layer
/// Adds a step's results to the parameters.
void apply(TrainingState& state, const StepResults& results, std::uint32_t members);

/// The expected results. Thread-safe. It keeps what it has computed for the last steps.
class ClosedForm {
 public:
  explicit ClosedForm(std::uint64_t seed) : seed_(seed), newest_(initial_state(seed)) {}

  /// The expected result of a step's exchange: for each layer the members' sum, divided by the layer's divisor.
  std::shared_ptr<const StepResults> results(std::uint64_t step, std::uint32_t members);
  /// The state that follows from the members of the steps.
  TrainingState state(const std::vector<std::uint32_t>& members);

 private:
  const std::uint64_t seed_;
  std::mutex mutex_;
  std::map<std::pair<std::uint64_t, std::uint32_t>, std::shared_ptr<const StepResults>> results_;  // guarded by mutex_
  TrainingState newest_;  // the last that was asked for; guarded by mutex_
};

/// A checksum of parameters and steps.
std::uint32_t digest_of(const TrainingState& state);

/// A text with the first different bit of two layers. Empty if there is no difference.
std::string first_difference(const std::vector<float>& got, const std::vector<float>& expected);
/// The same for all layers.
std::string first_difference(const TrainingState& got, const TrainingState& expected);

}  // namespace poseidon::testing
