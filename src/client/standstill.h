// Standstill: whether all members of a job wait for each other, so that no wait will ever end.
//
// A member stands if each thread that uses its client is inside a wait, nothing has moved for a while, and nothing is
// under way from it, to it or in a server. One that stands can only be moved by a message of one that does not.
//
// Each heartbeat carries its sender's level. The level of a member that does not stand is 0. Otherwise it is one more
// than the least level that it and its neighbours (mesh.h) had. So a level L says that all members at a distance of up
// to d stood L - d beats ago. Levels are compared with twice the longest distance and some more, because then there was
// one time at which all stood.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/one_thread.h"

namespace poseidon {

/// It has no clock and no connections of its own. One thread uses it.
class Standstill {
 public:
  /// `neighbours` are the ranks from which heartbeats come, each `interval` once.
  Standstill(std::size_t worker_count, std::vector<std::size_t> neighbours, std::chrono::nanoseconds interval);

  /// A heartbeat has come from this rank.
  void heard(std::size_t rank, std::uint32_t level, std::int64_t now_ns);
  /// A rank says what it waits for.
  void note(std::size_t rank, std::string waits_for);
  /// Once for each heartbeat of this rank: says whether this rank stands now. Returns the level to send.
  std::uint32_t beat(bool stands, std::int64_t now_ns);
  /// Whether this rank has stood for long enough to tell the others what it waits for. True once for each standing.
  bool is_to_tell();
  /// Whether all members stand.
  bool all_stand() const { return one_thread_.checked(level_) >= most_; }
  /// What the neighbours wait for, such as "ranks 1 and 2: …; rank 3 does not wait". `name` names a rank.
  std::string others(std::int64_t now_ns) const;

 private:
  struct Neighbour {
    std::size_t rank = 0;
    std::uint32_t level = 0;
    std::int64_t heard_ns = 0;  // 0: never
    std::string waits_for;
  };
  bool is_fresh(const Neighbour& neighbour, std::int64_t now_ns) const;

  const std::int64_t fresh_ns_;
  const std::uint32_t most_;
  std::vector<Neighbour> neighbours_;
  std::uint32_t level_ = 0;
  std::uint32_t stood_ = 0;  // beats in a row
  [[no_unique_address]] OneThread one_thread_{"Standstill"};
};

}  // namespace poseidon
