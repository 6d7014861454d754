// Whole clusters under faults, in virtual time. SIMULATION_FAULTS says how many are injected, SIMULATION_SEED where the
// seeds begin, and SIMULATION_TRACE is a file for the trace of that seed's cluster.
#include "simulation/simulation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iostream>

#include "base/clock.h"
#include "simulation/sanitized.h"

namespace poseidon::testing {
namespace {

constexpr std::size_t kFaultsPerCluster = 150;

std::uint64_t number_from_environment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

std::uint64_t first_seed() { return number_from_environment("SIMULATION_SEED", 1); }

double seconds_of(std::chrono::nanoseconds time) { return std::chrono::duration<double>(time).count(); }

/// The sum of several runs.
struct Sum {
  std::int64_t begun_ns = now_ns();
  std::size_t clusters = 0;
  std::uint64_t steps = 0;
  std::uint64_t generations = 0;
  std::uint64_t turns = 0;
  FaultCounts faults{};
  std::chrono::nanoseconds virtual_time{0};

  void add(const SimulationResult& result) {
    ++clusters;
    steps += result.step_count;
    generations += result.generation_count;
    turns += result.turn_count;
    virtual_time += result.virtual_time;
    for (std::size_t kind = 0; kind < kFaultKinds; ++kind) faults[kind] += result.faults[kind];
  }
  void print() const {
    std::cout << clusters << " clusters, " << steps << " steps, " << generations << " generations, "
              << seconds_of(virtual_time) << " s in " << seconds_of(std::chrono::nanoseconds(now_ns() - begun_ns))
              << " s and " << turns << " turns, " << describe(faults) << std::endl;
  }
};

TEST(Simulation, EveryFaultIsSurvivedWithTheRightBits) {
  const std::uint64_t goal = number_from_environment("SIMULATION_FAULTS", kSanitized ? 1000 : 12'000);
  const std::size_t budget = std::min<std::size_t>(kFaultsPerCluster, goal);
  Sum sum;
  for (std::uint64_t seed = first_seed(); total(sum.faults) < goal && !HasFailure(); ++seed) {
    const SimulationResult result = run(make_scenario(seed, budget));
    EXPECT_EQ(result.failure, "");
    sum.add(result);
  }
  sum.print();
  EXPECT_TRUE(HasFailure() || total(sum.faults) >= goal);
}

/// The first line in which two texts differ.
std::string first_different_line(const std::string& one, const std::string& other) {
  const auto at = static_cast<std::size_t>(std::ranges::mismatch(one, other).in1 - one.begin());
  const std::size_t begin = at == 0 ? 0 : one.rfind('\n', at - 1) + 1;
  return one.substr(begin, one.find('\n', at) - begin) + "\n" + other.substr(begin, other.find('\n', at) - begin);
}

TEST(Simulation, TheSameSeedGivesTheSameTrace) {
  for (std::uint64_t seed = first_seed(); seed < first_seed() + 6; ++seed) {
    const SimulationResult first = run(make_scenario(seed, 30), true);
    const SimulationResult second = run(make_scenario(seed, 30), true);
    EXPECT_EQ(first.failure, "");
    EXPECT_GT(first.trace.line_count(), 1000u);
    ASSERT_TRUE(first.trace.text() == second.trace.text())
        << "seed " << seed << ": " << first_different_line(first.trace.text(), second.trace.text());
    EXPECT_EQ(first.trace.digest(), second.trace.digest());
    const SimulationResult other = run(make_scenario(seed + 1000, 30));
    EXPECT_NE(other.trace.digest(), first.trace.digest());
    if (const char* const path = std::getenv("SIMULATION_TRACE"); path != nullptr && seed == first_seed())
      std::ofstream(path) << first.trace.text();
  }
}

TEST(Simulation, AnHourOfAStepASecond) {
  Sum sum;
  const SimulationResult result = run(make_hour(first_seed()));
  EXPECT_EQ(result.failure, "");
  EXPECT_GE(result.virtual_time, std::chrono::hours(1));
  EXPECT_GT(result.step_count, 2500u);
  EXPECT_GE(total(result.faults), kFaultsPerCluster);
  sum.add(result);
  sum.print();
}

}  // namespace
}  // namespace poseidon::testing
