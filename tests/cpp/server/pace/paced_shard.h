// A shard with a pace and its workers, for the tests of stragglers and of consistency.
#pragma once

#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "cpp/server/chunk/contributions.h"
#include "server/core/shard.h"

namespace poseidon::testing {

inline wire::Pace dropping(std::uint32_t straggler_steps = 8) {
  return {Stragglers::drop, Consistency::bsp, straggler_steps, 3};
}
inline wire::Pace stale(std::uint32_t staleness) { return {Stragglers::wait, Consistency::ssp, staleness, 0}; }
inline wire::Pace asynchronous() { return {Stragglers::wait, Consistency::async, 0, 0}; }

/// What the workers lend stays valid.
class PacedShard {
 public:
  PacedShard(std::uint32_t worker_count, const wire::Pace& pace, std::size_t memory_limit = 0)
      : workers(worker_count),
        budget(std::make_shared<MemoryBudget>(memory_limit)),
        shard(worker_count, {}, {}, budget) {
    shard.set_pace(pace, nullptr, [this](std::uint32_t rank, const std::string&) { noticed.push_back(rank); });
  }

  /// Returns a push of a mean over all workers.
  wire::Contribution header(std::uint32_t rank, std::uint64_t step) const {
    auto header = push_of(rank, static_cast<std::uint32_t>(workers.size()), step);
    header.divisor = header.worker_count;
    return header;
  }
  template <typename T>
  Status push(const wire::Contribution& header, const std::vector<T>& values) {
    lent.push_back(bytes_of(values));
    return shard.add(with_size(header, lent.back().size()), workers[header.rank], lent.back(), [] {});
  }
  Status push(std::uint32_t rank, std::uint64_t step, const Floats& values) { return push(header(rank, step), values); }
  /// Delivers the header and the first bytes.
  std::span<std::byte> begin(std::uint32_t rank, std::uint64_t step, const Floats& values) {
    const auto sized = with_size(header(rank, step), values.size() * sizeof(float));
    auto place = shard.begin(sized, workers[rank]);
    EXPECT_TRUE(place.ok()) << place.status().message();
    if (!place.ok()) return {};
    std::memcpy(place.value().data(), values.data(), place.value().size() / 2);
    shard.progress(sized, place.value().size() / 2);
    return place.value();
  }
  void complete(std::uint32_t rank, std::uint64_t step, const Floats& values, std::span<std::byte> place) {
    std::memcpy(place.data(), values.data(), place.size());
    shard.complete(with_size(header(rank, step), place.size()));
  }

  /// Runs steps 1 to 10 with all ranks. Until then no step ends without a rank.
  void learn(const Floats& values = {0}) {
    for (std::uint64_t step = 1; step <= 10; ++step)
      for (std::uint32_t rank = 0; rank < workers.size(); ++rank) ASSERT_TRUE(push(rank, step, values).ok());
  }
  void time_passes() { shard.pace().end_late_steps(now_ns() + 60'000'000'000); }

  const RecordingRequester::Sent& last(std::uint32_t rank) const { return workers[rank].sent.back(); }
  template <typename T = float>
  std::vector<T> result(std::uint32_t rank) const {
    return values_of<T>(last(rank).payload);
  }
  bool answered(std::uint32_t rank, std::uint64_t step) const {
    return !workers[rank].sent.empty() && last(rank).header.step == step;
  }

  std::vector<std::uint32_t> noticed;
  std::deque<Bytes> lent;
  std::vector<RecordingRequester> workers;
  std::shared_ptr<MemoryBudget> budget;
  Shard shard;
};

}  // namespace poseidon::testing
