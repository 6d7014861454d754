#include "plan/priority.h"

#include <algorithm>
#include <cmath>

#include "base/invariant.h"
#include "poseidon/plan.h"

namespace poseidon {

namespace {
constexpr double kFirstLevel = 1;
constexpr double kLastLevel = kPriorityLevelCount - 2;
}  // namespace

std::uint16_t level_of(double urgency) {
  return static_cast<std::uint16_t>(std::lround(kLastLevel - urgency * (kLastLevel - kFirstLevel)));
}

int priority_class(double urgency, double threshold, int class_count) {
  const int last = class_count - 1;
  if (last == 0 || urgency <= threshold) return last;
  const double part = (1 - urgency) / (1 - threshold) * last;
  return std::clamp(static_cast<int>(part), 0, last - 1);
}

PriorityMap::PriorityMap(int class_count)
    : default_{static_cast<std::uint16_t>(kLastLevel), static_cast<std::uint8_t>(class_count - 1)} {
  invariant(class_count > 0, "there is a class of priority");
}

void PriorityMap::set(std::uint32_t unit, Priority priority) {
  if (unit >= priorities_.size()) priorities_.resize(unit + 1, default_);
  priorities_[unit] = priority;
}

}  // namespace poseidon
