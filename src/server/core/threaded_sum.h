// The seam between a shard and a baseline that makes sums on other threads (src/server/baselines/wide_aggregation.h).
#pragma once

#include <cstddef>
#include <functional>
#include <future>
#include <vector>

#include "wire/messages/contribution.h"

namespace poseidon {

/// Makes the sum of a step whose parts are all here. A shard without one makes it on its own thread.
class ThreadedSum {
 public:
  virtual ~ThreadedSum() = default;
  /// Writes to `out` the sum of the inputs divided by the divisor of `shape`, which all of them have. Returns at once.
  /// `done` runs on one of the threads when the sum is made. After the future is ready nothing is read or written.
  virtual std::future<void> sum(std::vector<const std::byte*> inputs, const wire::Contribution& shape, std::byte* out,
                                std::function<void()> done) = 0;
};

}  // namespace poseidon
