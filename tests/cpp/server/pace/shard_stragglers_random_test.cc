// stragglers=drop on a shard, with ranks that push at random times: what every rank gets, step by step, against the
// mean over those who were in.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "cpp/server/pace/paced_shard.h"

namespace poseidon {
namespace {

using testing::dropping;
using testing::Floats;
using testing::PacedShard;

constexpr std::size_t kElements = 40;
constexpr std::uint64_t kRandomSteps = 40;

/// Returns whole numbers, so that sums are exact. Each step and rank has another number.
Floats gradient(std::uint32_t rank, std::uint64_t step) {
  return Floats(kElements, static_cast<float>((1U << rank) + 64 * step));
}

/// Ranks that push one step after the other at random speeds.
class RandomRun {
 public:
  explicit RandomRun(std::uint64_t seed)
      : random_(seed),
        worker_count_(static_cast<std::uint32_t>(2 + seed % 5)),
        straggler_steps_(static_cast<std::uint32_t>(1 + seed % 4)),
        paced_(worker_count_, dropping(straggler_steps_)),
        step_of_(worker_count_, 0),
        places_(worker_count_),
        seen_(worker_count_, 0) {}

  void run() {
    while (!::testing::Test::HasFailure() &&
           std::ranges::any_of(step_of_, [this](auto step) { return step < kRandomSteps || waits(step); })) {
      if (random_() % 4 == 0) paced_.time_passes();
      const auto rank = static_cast<std::uint32_t>(std::min(random_() % worker_count_, random_() % worker_count_));
      act(rank);
      look_at_answers();
    }
    check();
  }

 private:
  bool waits(std::uint64_t step) const { return !answers_.contains(step) || answers_.at(step).size() < worker_count_; }

  void act(std::uint32_t rank) {
    const std::uint64_t step = step_of_[rank];
    if (!places_[rank].empty()) {
      if (random_() % 2 == 0) paced_.complete(rank, step, gradient(rank, step), std::exchange(places_[rank], {}));
      return;
    }
    if (step == kRandomSteps || (step > 0 && !paced_.answered(rank, step))) return;
    ++step_of_[rank];
    if (random_() % 3 == 0)
      places_[rank] = paced_.begin(rank, step + 1, gradient(rank, step + 1));
    else
      ASSERT_TRUE(paced_.push(rank, step + 1, gradient(rank, step + 1)).ok());
  }

  void look_at_answers() {
    std::uint64_t least = kRandomSteps;
    std::uint64_t most = 0;
    for (std::uint32_t rank = 0; rank < worker_count_; ++rank) {
      const auto& sent = paced_.workers[rank].sent;
      for (; seen_[rank] < sent.size(); ++seen_[rank])
        EXPECT_TRUE(answers_[sent[seen_[rank]].header.step].try_emplace(rank, sent[seen_[rank]]).second);
      const std::uint64_t answered = sent.empty() ? 0 : sent.back().header.step;
      least = std::min(least, answered);
      most = std::max(most, answered);
      EXPECT_TRUE(paced_.workers[rank].refusals.empty());
    }
    EXPECT_LE(most - least, straggler_steps_);
  }

  void check() {
    for (std::uint64_t step = 1; step <= kRandomSteps; ++step) {
      Floats mean(kElements, 0);
      std::uint32_t count = 0;
      for (const auto& [rank, answer] : answers_[step]) {
        if (wire::StepResult::read(answer.header).late) continue;
        ++count;
        for (std::size_t i = 0; i < kElements; ++i) mean[i] += gradient(rank, step)[i];
      }
      EXPECT_GT(2 * count, worker_count_);
      for (auto& element : mean) element /= static_cast<float>(count);
      for (const auto& [rank, answer] : answers_[step])
        EXPECT_EQ(testing::values_of(answer.payload), mean) << "rank " << rank << ", step " << step;
      late_count += worker_count_ - count;
    }
  }

 public:
  std::size_t late_count = 0;

 private:
  std::mt19937_64 random_;
  const std::uint32_t worker_count_;
  const std::uint32_t straggler_steps_;
  PacedShard paced_;
  std::vector<std::uint64_t> step_of_;  // the last that it has begun to push, by rank
  std::vector<std::span<std::byte>> places_;
  std::vector<std::size_t> seen_;                                                                // answers, by rank
  std::map<std::uint64_t, std::map<std::uint32_t, testing::RecordingRequester::Sent>> answers_;  // by step and rank
};

TEST(RandomStragglers, AllRanksGetTheMeanOverThoseWhoWereIn) {
  std::size_t late_count = 0;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomRun random(seed);
    random.run();
    if (HasFailure()) return;
    late_count += random.late_count;
  }
  EXPECT_GT(late_count, 500u);
}

}  // namespace
}  // namespace poseidon
