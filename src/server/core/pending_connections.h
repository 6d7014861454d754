// PendingConnections: a core's connections that have not said hello. They do not keep their descriptors for ever.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>

#include "base/clock.h"
#include "transport/transport.h"

namespace poseidon {

/// Only the loop's thread uses it.
class PendingConnections {
 public:
  /// At most `most` connections stay at the same time, each for at most `patience`. The loop must outlive this.
  PendingConnections(Loop& loop, std::size_t most, std::chrono::milliseconds patience)
      : loop_(loop), most_(most), patience_(patience) {}

  /// A connection has come, with a number above that of all earlier ones. The oldest is closed if there are too many.
  void add(std::uint64_t id, Flow& flow);
  /// It has said hello, or closed.
  void remove(std::uint64_t id);

 private:
  struct Pending {
    Flow* flow = nullptr;
    Clock::time_point since = Clock::now();
  };
  void dismiss_oldest();
  void watch();

  Loop& loop_;
  const std::size_t most_;
  const std::chrono::milliseconds patience_;
  std::map<std::uint64_t, Pending> by_id_;  // the oldest first
  bool watched_ = false;                    // a timer runs
};

}  // namespace poseidon
