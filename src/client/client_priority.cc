// Priorities, as the API sets them (Geryon §III).
#include <algorithm>
#include <map>

#include "client/client_impl.h"
#include "plan/priority.h"
#include "poseidon/plan.h"

namespace poseidon {

static_assert(kPriorityLevelCount == wire::kPriorityLevels);

Status ClientImpl::set_priorities(std::uint32_t first_layer, std::span<const LayerPriority> priorities,
                                  double priority_threshold) {
  const auto is_share = [](double value) { return value >= 0 && value <= 1; };  // false for NaN
  if (!is_share(priority_threshold)) return {ErrorCode::invalid_argument, "a priority threshold is from 0 to 1"};
  std::map<std::uint32_t, Priority> by_unit;
  {
    const std::lock_guard lock(mutex_);
    if (first_layer > layers_.size() || priorities.size() > layers_.size() - first_layer)
      return {ErrorCode::invalid_argument,
              "there is no layer " + std::to_string(first_layer + priorities.size() - 1) + " to set a priority of"};
    for (std::size_t i = 0; i < priorities.size(); ++i) {
      const LayerPriority& given = priorities[i];
      if (!is_share(given.urgency) || given.priority_class < -1 || given.priority_class >= options_.priority_classes)
        return {ErrorCode::invalid_argument,
                "a layer's urgency is from 0 to 1 and its class below " + std::to_string(options_.priority_classes)};
      const Priority priority{
          level_of(given.urgency),
          static_cast<std::uint8_t>(given.priority_class >= 0 ? given.priority_class
                                                              : priority_class(given.urgency, priority_threshold,
                                                                               options_.priority_classes))};
      // A group is as urgent as its most urgent member.
      auto [known, fresh] = by_unit.try_emplace(layers_[first_layer + i]->unit->syncer.unit().id, priority);
      known->second.level = std::min(known->second.level, priority.level);
      known->second.priority_class = std::min(known->second.priority_class, priority.priority_class);
    }
  }
  loop_->post([this, by_unit = std::move(by_unit)] {
    for (const auto& [unit, priority] : by_unit) connections_.priorities().set(unit, priority);
  });
  return {};
}

}  // namespace poseidon
