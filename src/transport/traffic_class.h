// How the flows of a priority class are marked.
#pragma once

#include <algorithm>
#include <cstddef>

#include "poseidon/options.h"
#include "transport/transport.h"

namespace poseidon {

/// The options' code point, and from the first class to the last socket priorities from 6, the highest that needs no
/// right, down to 0.
inline TrafficClass traffic_class_of(const Options& options, std::size_t priority_class) {
  constexpr std::size_t kHighestPriority = 6;
  const auto last = static_cast<std::size_t>(std::max(options.priority_classes, 1)) - 1;
  const std::size_t known = std::min(priority_class, last);
  TrafficClass traffic_class;
  if (!options.dscp.empty()) traffic_class.dscp = options.dscp[std::min(known, options.dscp.size() - 1)];
  if (last > 0) traffic_class.socket_priority = static_cast<int>(kHighestPriority * (last - known) / last);
  return traffic_class;
}

}  // namespace poseidon
