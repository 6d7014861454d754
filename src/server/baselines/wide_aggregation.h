// aggregation=wide, the baseline of Parameter Hub Figure 7: many threads work on one array, all of which must have
// arrived first.
#pragma once

#include <functional>
#include <vector>

#include "base/executor.h"
#include "server/core/threaded_sum.h"

namespace poseidon {

class WideAggregation final : public ThreadedSum {
 public:
  explicit WideAggregation(int thread_count) : executor_(thread_count) {}

  Completion sum(std::vector<const std::byte*> inputs, const wire::Contribution& shape, std::byte* out,
                 std::function<void()> done) override;

 private:
  Executor executor_;
};

}  // namespace poseidon
