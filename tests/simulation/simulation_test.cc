// Whole clusters under faults. SIMULATION_FAULTS says how many are injected, SIMULATION_SEED where the seeds begin.
#include "simulation/simulation.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <thread>

namespace poseidon::testing {
namespace {

constexpr std::size_t kFaultsPerCluster = 150;
constexpr int kClustersAtOnce = 8;  // they wait more than they compute

std::uint64_t number_from_environment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

TEST(Simulation, EveryFaultIsSurvivedWithTheRightBits) {
  const std::uint64_t goal = number_from_environment("SIMULATION_FAULTS", kSlowness == 1 ? 10'000 : 1000);
  const std::uint64_t first_seed = number_from_environment("SIMULATION_SEED", 1);
  const std::size_t budget = std::min<std::size_t>(kFaultsPerCluster, goal);
  std::mutex mutex;
  FaultCounts faults{};
  std::uint64_t clusters = 0;
  std::uint64_t steps = 0;
  std::uint64_t generations = 0;
  std::atomic<std::uint64_t> next_seed{first_seed};
  std::atomic<bool> enough{false};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kClustersAtOnce; ++thread)
    threads.emplace_back([&] {
      while (!enough) {
        const SimulationResult result = run(make_scenario(next_seed++, budget));
        const std::lock_guard lock(mutex);
        EXPECT_EQ(result.failure, "");
        for (std::size_t kind = 0; kind < kFaultKinds; ++kind) faults[kind] += result.faults[kind];
        ++clusters;
        steps += result.step_count;
        generations += result.generation_count;
        if (total(faults) >= goal || HasFailure()) enough = true;
      }
    });
  for (auto& thread : threads) thread.join();
  std::cout << clusters << " clusters, " << steps << " steps, " << generations << " generations, " << describe(faults)
            << std::endl;
  EXPECT_TRUE(HasFailure() || total(faults) >= goal);
}

}  // namespace
}  // namespace poseidon::testing
