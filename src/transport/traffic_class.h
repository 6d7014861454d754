// How the flows of a priority class are marked.
#pragma once

#include <algorithm>
#include <cstddef>

#include "poseidon/options.h"
#include "transport/transport.h"

namespace poseidon {

/// The options' code point, and a socket priority. Of the socket priorities that need no privilege, Linux's default
/// queues serve 6 first, then 4 and 0 (best effort), and all others last.
inline TrafficClass traffic_class_of(const Options& options, std::size_t priority_class) {
  const auto last = static_cast<std::size_t>(std::max(options.priority_classes, 1)) - 1;
  const std::size_t known = std::min(priority_class, last);
  TrafficClass traffic_class;
  if (!options.dscp.empty()) traffic_class.dscp = options.dscp[std::min(known, options.dscp.size() - 1)];
  if (known < last) traffic_class.socket_priority = known == 0 ? 6 : 4;
  traffic_class.shared = last > 0;
  traffic_class.yields = last > 0 && known == last;
  return traffic_class;
}

}  // namespace poseidon
