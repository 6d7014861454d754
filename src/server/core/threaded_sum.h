// The interface between a shard and a baseline that makes sums on other threads
// (src/server/baselines/wide_aggregation.h).
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "base/thread.h"
#include "wire/messages/contribution.h"

namespace poseidon {

/// Makes the sum of a step that has all its parts. A shard without a ThreadedSum makes it on its own thread.
class ThreadedSum {
 public:
  virtual ~ThreadedSum() = default;
  /// Sums the inputs, divides by the divisor of `shape`, and writes the result to `out`. All inputs have that shape. It
  /// returns at once. `done` runs on one of the threads when the sum is complete. After the completion, nothing is
  /// read or written.
  virtual Completion sum(std::vector<const std::byte*> inputs, const wire::Contribution& shape, std::byte* out,
                         std::function<void()> done) = 0;
};

}  // namespace poseidon
