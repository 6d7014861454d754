// PriorityMap: decides which flow carries a unit, and the unit's place in the send queue (Geryon §III).
#pragma once

#include <cstdint>
#include <vector>

namespace poseidon {

/// The number of levels in the send queues (wire::kPriorityLevels).
inline constexpr int kPriorityLevelCount = 1024;

/// The priority of a unit's messages and of their answers.
struct Priority {
  std::uint16_t level = 0;          // the level in send queues: wire::Header::priority
  std::uint8_t priority_class = 0;  // the class of the flow; 0 is the most urgent
};

/// Returns a unit's level. The first level is for messages that begin or end a connection, and the last is for
/// goodbyes. Units have the levels between them.
std::uint16_t level_of(double urgency);

/// The map is written when priorities are set, and read for every message. Both happen on the client's loop, so it
/// needs no locks.
class PriorityMap {
 public:
  /// Units without a priority go after all others, in the last class.
  explicit PriorityMap(int class_count);

  Priority of(std::uint32_t unit) const { return unit < priorities_.size() ? priorities_[unit] : default_; }
  void set(std::uint32_t unit, Priority priority);

 private:
  Priority default_;
  std::vector<Priority> priorities_;  // by unit id
};

}  // namespace poseidon
