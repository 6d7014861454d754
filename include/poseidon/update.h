// Update rules: how a server turns a step's mean gradient into new parameters (Parameter Hub §3.2.2).
//
// A rule has a kind, which is known by its name, and values such as its learning rate. The built-in kinds are sgd,
// adam, adamw and lamb. register_update_rule adds further ones to this process. A rule also names the aggregator that
// makes the mean gradient of what the ranks contribute (aggregate.h).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "poseidon/aggregate.h"
#include "poseidon/status.h"

namespace poseidon {

/// The most arrays that a kind of rule may keep beside the parameters.
inline constexpr std::size_t kMaxUpdateStates = 4;
/// The most values that a kind of rule may have.
inline constexpr std::size_t kMaxUpdateValues = 12;
/// The longest name of a kind.
inline constexpr std::size_t kMaxUpdateNameBytes = 24;
/// What `Client::pull` calls the mean gradient of the last update, where the rule keeps it.
inline constexpr std::uint32_t kGradientArray = kMaxUpdateStates + 1;

/// What a kind's function gets: one chunk of a layer. T is the parameters' type. All spans have the same number of
/// elements and none overlap.
template <typename T>
struct UpdateCall {
  std::span<T> parameters;      // to be updated in place
  std::span<const T> gradient;  // the mean over the ranks
  /// As many as UpdateKind::state_count says, to be updated in place; the others are empty. Zeros before the first
  /// update.
  std::array<std::span<T>, kMaxUpdateStates> states;
  std::span<T> scratch;            // for intermediate results, with any content. Empty unless UpdateKind::needs_scratch
  std::uint64_t update_count = 0;  // of the chunk, this update included: 1 in the first one
  std::span<const double> values;  // in the order of UpdateKind::values
};

/// One of a kind's values.
struct UpdateValue {
  std::string name;  // as in UpdateRule::set and as the keyword in Python
  double least = std::numeric_limits<double>::lowest();
  double most = std::numeric_limits<double>::max();
  double initial = 0;    // where nobody sets it
  bool is_flag = false;  // only 0 and 1 are allowed
};

/// A kind of update rule.
///
/// The two functions do the same for the two types that servers update. They have to be deterministic: the result
/// depends on the call alone. They may run on several threads at once, each with another chunk, and must not throw.
/// Layers are cut into chunks anywhere. So an element's result may depend only on the values of this element, unless
/// `whole_layer` says that the kind takes uncut layers alone.
struct UpdateKind {
  std::string name;
  std::vector<UpdateValue> values;
  /// How many arrays of the parameters' size a rule with these values keeps from step to step. At most
  /// kMaxUpdateStates, and the same whenever the values are the same.
  std::function<std::size_t(std::span<const double> values)> state_count;
  std::function<void(const UpdateCall<float>&)> update_float32;
  std::function<void(const UpdateCall<double>&)> update_float64;
  bool whole_layer = false;
  bool needs_scratch = false;
  /// Updates with the parts of a gradient, one after the other, go as far as one with their sum. A kind that divides by
  /// the size of the gradient has it not. Needed for consistency=ssp and async, where a server updates with each rank's
  /// part by itself.
  bool takes_parts = false;
};

/// Makes a kind of rule known to this process, for good. Do so before the first step, in every process that hosts a
/// server and in every worker that sets the rule. Servers refuse rules of a kind that they do not know.
/// ErrorCode::invalid_argument names what is wrong: a name that is taken, empty or too long, too many values, a
/// function that is missing. Any thread.
Status register_update_rule(UpdateKind kind);

/// The kind with this name; null where this process knows none. Any thread. The kind stays where it is.
const UpdateKind* find_update_rule(std::string_view name);

/// The names of the kinds that this process knows, in the order of registration. Any thread.
std::vector<std::string> update_rule_names();

/// A kind with the values of one step. Copying it copies the numbers, not the kind.
struct UpdateRule {
  const UpdateKind* kind = nullptr;                  // null: the server returns the reduced gradient
  std::array<double, kMaxUpdateValues> values = {};  // in the order of kind->values
  bool keeps_gradient = false;  // the server keeps the mean gradient until the next update, as array kGradientArray
  /// The name of the aggregator whose result is the gradient, or with a null `kind` the layer's new value. The servers
  /// have to know it. Any other than the sum takes the place of a mean over all ranks: pushes are dense and of a
  /// floating-point type, and their divisor is a multiple of the number of ranks. It needs consistency=bsp and
  /// reduce_order=rank. A server collects the contributions of all ranks, so a step takes that much of its memory.
  std::string aggregator = std::string(kSumAggregator);

  /// Sets one value. ErrorCode::invalid_argument, naming it, where the kind has no such value or the number is out of
  /// its range.
  Status set(std::string_view name, double number);

  bool operator==(const UpdateRule&) const = default;
};

/// A rule of the kind with this name; "none": of no kind. Values that are not given have their initial numbers.
/// ErrorCode::invalid_argument for an unknown name, naming those that are known, and as UpdateRule::set.
Result<UpdateRule> make_update_rule(std::string_view kind,
                                    const std::vector<std::pair<std::string, double>>& values = {});

/// Arrays of the parameters' size that the rule keeps from step to step.
std::size_t update_state_count(const UpdateRule& rule);

}  // namespace poseidon
