#include "wire/pace.h"

#include <bit>
#include <string>

namespace poseidon::wire {

namespace {

constexpr float kMostFactor = 1e6F;

// PaceNumbers::choice (docs/wire-format.md).
enum PaceChoice : std::uint8_t { kWait = 0, kDrop = 1, kSsp = 2, kAsync = 3 };

bool is_factor(float factor) { return factor >= 0 && factor <= kMostFactor; }  // false for NaN

Status invalid(const std::string& what) { return {ErrorCode::invalid_argument, what}; }

}  // namespace

Result<Pace> pace_of(const Options& options) {
  Pace pace;
  pace.stragglers = options.stragglers;
  pace.consistency = options.consistency;
  const bool drops = pace.stragglers == Stragglers::drop;
  if (drops) {
    if (options.straggler_steps < 1 || options.straggler_steps > static_cast<int>(kMostStragglerSteps))
      return invalid(
          concat("straggler_steps is ", options.straggler_steps, ": it must be from 1 to ", kMostStragglerSteps));
    pace.bound = static_cast<std::uint32_t>(options.straggler_steps);
    pace.factor = static_cast<float>(options.straggler_factor);
    if (!is_factor(pace.factor)) return invalid("straggler_factor must be from 0 to a million");
  }
  if (pace.consistency == Consistency::ssp) {
    if (options.staleness < 0 || options.staleness > static_cast<int>(kMostStaleness))
      return invalid(concat("staleness is ", options.staleness, ": it must be from 0 to ", kMostStaleness));
    pace.bound = static_cast<std::uint32_t>(options.staleness);
  }
  return pace;
}

FeatureSet features_of(const Pace& pace) {
  Options options;
  options.stragglers = pace.stragglers;
  options.consistency = pace.consistency;
  return FeatureSet(options);
}

PaceNumbers numbers_of(const Pace& pace) {
  const std::uint8_t choice = pace.stragglers == Stragglers::drop      ? kDrop
                              : pace.consistency == Consistency::ssp   ? kSsp
                              : pace.consistency == Consistency::async ? kAsync
                                                                       : kWait;
  return {choice, pace.bound, pace.factor};
}

std::optional<Pace> pace_of(const PaceNumbers& numbers) {
  Pace pace;
  pace.bound = numbers.bound;
  pace.factor = numbers.factor;
  const bool plain = std::bit_cast<std::uint32_t>(numbers.factor) == 0;
  switch (numbers.choice) {
    case kWait:
      if (plain && pace.bound == 0) return pace;
      break;
    case kDrop:
      pace.stragglers = Stragglers::drop;
      if (is_factor(pace.factor) && pace.bound >= 1 && pace.bound <= kMostStragglerSteps) return pace;
      break;
    case kSsp:
      pace.consistency = Consistency::ssp;
      if (plain && pace.bound <= kMostStaleness) return pace;
      break;
    case kAsync:
      pace.consistency = Consistency::async;
      if (plain && pace.bound == 0) return pace;
      break;
    default:
      break;
  }
  return std::nullopt;
}

}  // namespace poseidon::wire
