// UnitAnnouncer: tells the servers about the units whose values they keep.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "base/clock.h"
#include "base/one_thread.h"
#include "poseidon/plan.h"
#include "scheme/scheme.h"

namespace poseidon {

/// Rank 0 alone announces units. Only the loop's thread uses it.
class UnitAnnouncer {
 public:
  /// Sets the version of the servers' checkpoints from which values have been restored. It is part of all announcements
  /// from here on.
  void set_restored_version(std::uint64_t version) { one_thread_.checked(restored_version_) = version; }
  /// Tells every core of every server about the plan's stored units. Call it before any other message about these units
  /// is sent. Then every core knows them before one of their steps is complete anywhere.
  void announce(const Plan& plan, const Links& links);

 private:
  /// A number that grows with each run of a job.
  const std::uint64_t run_ = static_cast<std::uint64_t>(wall_ns());
  std::map<std::string, std::size_t> names_;  // the number of units of each name
  std::uint64_t restored_version_ = 0;
  [[no_unique_address]] OneThread one_thread_{"UnitAnnouncer"};
};

}  // namespace poseidon
