// A run of one simulated cluster: faults until the budget is used up, then no faults, when every slot has to go on.
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
inline constexpr int kSlowness = 5;  // a timeout must not pass while all processes only compute
#else
inline constexpr int kSlowness = 1;
#endif

/// The scenario that follows from a seed.
struct Scenario {
  std::uint64_t seed = 0;
  int host_count = 1;  // machines
  bool in_racks = false;
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
  std::uint64_t step_count = 0;        // steps that every slot has committed
  std::uint32_t generation_count = 0;  // the most generations of which one slot was part
  /// Wrong bits, undone steps and hangs, with all that is known about them. Empty if there were none.
  std::string failure;
};

/// Runs the scenario and compares every parameter of every slot with the closed form. If a thread does not return, it
/// prints what is known and ends the process.
SimulationResult run(const Scenario& scenario);

}  // namespace poseidon::testing
