// A run of one simulated cluster: faults until the budget is used up, then no faults, when every slot has to go on.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "poseidon/options.h"
#include "simulation/faults.h"
#include "simulation/simulated_world.h"

namespace poseidon::testing {

/// The scenario that follows from a seed.
struct Scenario {
  std::uint64_t seed = 0;
  int host_count = 1;  // machines
  bool in_racks = false;
  Options options;  // world_size, on_failure, timeout and what chunks, flows and cores there are
  FaultRates rates;
  std::size_t fault_budget = 0;
  std::chrono::milliseconds computing{1};  // in a step
  std::chrono::seconds longest_storm{20};  // then it is calm, however few faults there have been
  std::uint64_t most_storm_steps = 300;    // and after so many steps
  std::chrono::milliseconds longest_delay{0};
  std::chrono::milliseconds longest_partition{0};
};
/// `fault_budget`: after how many faults the calm begins.
Scenario make_scenario(std::uint64_t seed, std::size_t fault_budget);
/// An hour of 4 workers which take a step a second.
Scenario make_hour(std::uint64_t seed);
std::string describe(const Scenario& scenario);

struct SimulationResult {
  FaultCounts faults{};
  std::uint64_t step_count = 0;        // steps that every slot has committed
  std::uint32_t generation_count = 0;  // the most generations of which one slot was part
  /// Wrong bits, undone steps and hangs, with all that is known about them. Empty if there were none.
  std::string failure;
  std::chrono::nanoseconds virtual_time{0};
  std::uint64_t turn_count = 0;  // of threads
  Trace trace;
};

/// Runs the scenario in a simulated world and compares every parameter of every slot with the closed form. If a thread
/// does not return, it prints what is known and ends the process. `keeps_trace`: not only the trace's digest.
SimulationResult run(const Scenario& scenario, bool keeps_trace = false);

}  // namespace poseidon::testing
