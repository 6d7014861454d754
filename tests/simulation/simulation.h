// A run of one simulated cluster: faults until its budget is used up, then calm, in which everybody has to go on.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "poseidon/options.h"
#include "simulation/faults.h"

namespace poseidon::testing {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr int kSlowness = 5;  // a timeout must not pass while everybody only computes
#else
inline constexpr int kSlowness = 1;
#endif

/// What a seed stands for.
struct Scenario {
  std::uint64_t seed = 0;
  Options options;  // world_size, on_failure, timeout and what chunks, flows and cores there are
  FaultRates rates;
  std::size_t fault_budget = 0;
  std::chrono::milliseconds longest_delay{0};
  std::chrono::milliseconds longest_partition{0};
};
/// `fault_budget`: after how many faults the calm begins.
Scenario make_scenario(std::uint64_t seed, std::size_t fault_budget);
std::string describe(const Scenario& scenario);

struct SimulationResult {
  FaultCounts faults{};
  std::uint64_t step_count = 0;        // that every slot has committed
  std::uint32_t generation_count = 0;  // that one slot was part of, at most
  /// Wrong bits, undone steps and hangs, with all that is known about them; empty when all went well.
  std::string failure;
};

/// Runs it and compares every parameter of every slot with the closed form. Ends the process, after printing what is
/// known, when a thread does not come back.
SimulationResult run(const Scenario& scenario);

}  // namespace poseidon::testing
