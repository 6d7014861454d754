// PriorityMap: which flow carries which unit, and what goes first on it (Geryon §III).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace poseidon {

/// How many levels the queues tell apart (wire::kPriorityLevels).
inline constexpr int kPriorityLevelCount = 1024;

/// Of what one unit sends and is sent.
struct Priority {
  std::uint16_t level = 0;          // in send queues: wire::Header::priority
  std::uint8_t priority_class = 0;  // of the flow; 0 the most urgent
};

/// Levels between the first, for what ends or begins a connection, and the last, for goodbyes.
std::uint16_t level_of(double urgency);

/// Written when priorities are set and read for every message, both on the client's loop: no locks.
class PriorityMap {
 public:
  /// For units that nobody has set: after all others, in the last class.
  explicit PriorityMap(int class_count);

  Priority of(std::uint32_t unit) const { return unit < priorities_.size() ? priorities_[unit] : default_; }
  void set(std::uint32_t unit, Priority priority);

 private:
  Priority default_;
  std::vector<Priority> priorities_;  // by unit id
};

}  // namespace poseidon
