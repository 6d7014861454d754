// A training whose every bit is known: whole-numbered gradients, so that sums are exact in any order.
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
  std::size_t factor_count = 0;   // K of each rank's factors; 0: a dense gradient
  bool sometimes_absent = false;  // at some ranks in some steps
};

/// Chunked, factored, changing its scheme, grouped, divided, sometimes absent: of odd sizes.
const std::vector<SimulatedLayer>& simulated_model();
/// As Client::add_layers takes them.
std::vector<Layer> model_layers();

/// What one slot contributes to a layer in a step.
struct SimulatedGradient {
  bool absent = false;
  bool as_factors = false;  // where the layer's scheme takes them
  std::vector<float> dense;
  // Where the layer has factors: K×M and K×N, row-major; `dense` is their product.
  std::vector<float> left;
  std::vector<float> right;
};
SimulatedGradient gradient_of(std::uint64_t seed, int slot, std::uint64_t step, std::size_t layer);

/// The parameters of all layers, and how they came about. A step is committed as a whole or not at all.
struct TrainingState {
  std::vector<std::vector<float>> parameters;
  std::vector<std::uint32_t> members;  // of each committed step: its slots, one bit each

  std::uint64_t committed() const { return members.size(); }
};

/// Before the first step.
TrainingState initial_state(std::uint64_t seed);
using StepResults = std::vector<std::vector<float>>;  // by layer
/// Adds a step's results to the parameters.
void apply(TrainingState& state, const StepResults& results, std::uint32_t members);

/// What has to come of it. Thread-safe; keeps what it has computed.
class ClosedForm {
 public:
  explicit ClosedForm(std::uint64_t seed) : seed_(seed) {}

  /// What a step's exchange has to give everyone: for each layer the members' sum divided by the layer's divisor.
  std::shared_ptr<const StepResults> results(std::uint64_t step, std::uint32_t members);
  /// The state that follows from the steps' members alone.
  TrainingState state(const std::vector<std::uint32_t>& members);

 private:
  const std::uint64_t seed_;
  std::mutex mutex_;
  std::map<std::pair<std::uint64_t, std::uint32_t>, std::shared_ptr<const StepResults>> results_;  // guarded by mutex_
};

/// The first difference between two layers, bit for bit; empty when there is none.
std::string first_difference(const std::vector<float>& got, const std::vector<float>& expected);
/// The same for all layers.
std::string first_difference(const TrainingState& got, const TrainingState& expected);

}  // namespace poseidon::testing
