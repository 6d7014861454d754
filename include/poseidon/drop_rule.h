// DropRule: when servers end steps with stragglers=drop, for simulations. It is the servers' own code.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

namespace poseidon {

/// Ends the steps of one chunk at simulated times, in ns. Not thread-safe (Arrivals checks it, in builds with
/// checks).
class DropRule {
 public:
  /// `factor` is the option straggler_factor.
  DropRule(std::uint32_t worker_count, double factor);
  ~DropRule();
  DropRule(const DropRule&) = delete;
  DropRule& operator=(const DropRule&) = delete;

  /// Returns when the next step ends. `arrivals_ns` has the time at which each rank's contribution is complete, by
  /// rank, one for each worker. Until `waits_until_ns` the step ends for all ranks only, because some rank is
  /// straggler_steps behind.
  std::int64_t end_step(std::span<const std::int64_t> arrivals_ns, std::int64_t waits_until_ns);

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace poseidon
