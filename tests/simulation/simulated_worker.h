// SimulatedWorker: a training process of a simulated cluster, which survives the loss of others.
#pragma once

#include <atomic>
#include <compare>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "poseidon/client.h"
#include "simulation/faulty_network.h"
#include "simulation/random_calls.h"
#include "simulation/simulated_store.h"
#include "simulation/training.h"

namespace poseidon::testing {

/// What the workers of a cluster share. Thread-safe.
struct SimulatedCluster {
  SimulatedCluster(std::uint64_t cluster_seed, const Options& shared_options)
      : seed(cluster_seed), options(shared_options), closed_form(cluster_seed) {}

  const std::uint64_t seed;
  const Options options;                   // of slot 0; a worker sets its rank, generation and machine
  int host_count = 1;                      // machines, which the slots take in turn
  bool in_racks = false;                   // the first machine is in a rack of its own
  std::chrono::milliseconds computing{1};  // in a step: who is alone would rush ahead
  std::shared_ptr<FaultyNetwork> network;
  std::shared_ptr<SimulatedStore> store;
  ClosedForm closed_form;
  std::atomic<bool> stop{false};

  /// Reports something that must not happen: a wrong bit, a step that was undone, an error after which nobody can go
  /// on.
  void report(const std::string& error);
  std::vector<std::string> errors() const;

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> errors_;
};

/// One process. It knows nothing when it begins.
class SimulatedWorker {
 public:
  SimulatedWorker(SimulatedCluster& cluster, int slot);

  /// Trains until cluster.stop is set, it is killed or learns that another process has its place. Blocks.
  void run();

  // Any thread.

  const std::string& name() const { return node_->name; }
  /// Whether another process has to be started in its place, because it has ended or is believed to have ended.
  bool needs_successor() const { return ended_ || node_->replaced; }
  bool ended() const { return ended_; }
  std::uint64_t committed() const { return committed_; }
  /// The last generation that it was part of, and how many it was part of.
  std::uint32_t generation() const { return generation_; }
  std::uint32_t generation_count() const { return generation_count_; }
  /// A text that says what it does, and what ended its last generations.
  std::string describe() const;

  // After run() only.

  const TrainingState& state() const { return state_; }
  /// The generation in which its state was last agreed on.
  std::uint32_t agreed_generation() const { return agreed_generation_; }

 private:
  /// One generation that it is part of.
  struct Generation {
    std::vector<Prepared> calls;  // of collectives, whose memory outlives the client
    std::unique_ptr<Client> client;
    std::uint32_t first_layer = 0;
    std::uint32_t facts_layer = 0;  // of all ranks: slot, age of the state, steps committed
    std::uint32_t members = 0;      // slots
  };

  /// Which of two states counts: the one that was agreed on later and, of equal ones, the one with more steps. A
  /// process that was left out of a generation (shrink) may have as many steps as the others, but not the same ones.
  struct Version {
    std::int64_t agreed = 0;  // the generation in which the state was last agreed on
    std::int64_t committed = 0;
    auto operator<=>(const Version&) const = default;
  };

  bool alive() const { return !cluster_.stop && !node_->dead; }
  Status take_part();
  Status form(Generation& generation);
  Status agree(Generation& generation);
  Status share_state(Generation& generation, const Version& newest, std::size_t source);
  void adopt(TrainingState state, const Version& version);
  Status step(Generation& generation);
  Status call_collective(Generation& generation, std::uint64_t number);
  void choose_schemes(const Generation& generation, std::uint64_t number);
  Status start(Generation& generation, std::size_t layer, const SimulatedGradient& gradient,
               std::vector<float>& result);
  void commit(const Generation& generation, StepResults& results);
  void set_phase(const std::string& phase);

  SimulatedCluster& cluster_;
  const int slot_;
  const std::shared_ptr<Node> node_;
  std::shared_ptr<Store> store_;
  TrainingState state_;
  std::uint32_t agreed_generation_ = 0;
  std::atomic<std::uint32_t> generation_{0};
  std::atomic<std::uint32_t> generation_count_{0};
  std::atomic<std::uint64_t> committed_{0};
  std::atomic<bool> ended_{false};

  mutable std::mutex mutex_;
  std::string phase_;              // guarded by mutex_
  std::vector<std::string> ends_;  // of generations, guarded by mutex_
};

}  // namespace poseidon::testing
