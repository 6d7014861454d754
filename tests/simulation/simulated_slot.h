// SimulatedSlot: the processes of one slot, one after the other, as a launcher would start them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/thread.h"
#include "simulation/simulated_worker.h"

namespace poseidon::testing {

/// One thread uses it, which is none of the processes'. All of them have to end before it is destroyed.
class SimulatedSlot {
 public:
  SimulatedSlot(SimulatedCluster& cluster, int slot) : cluster_(cluster), slot_(slot) { begin_process(); }
  ~SimulatedSlot() {
    for (auto& thread : threads_) thread.join();
  }
  SimulatedSlot(const SimulatedSlot&) = delete;
  SimulatedSlot& operator=(const SimulatedSlot&) = delete;

  /// Starts a process if the present one has ended, or is believed to have ended.
  void supervise() {
    if (present().needs_successor()) begin_process();
  }

  const SimulatedWorker& present() const { return *processes_.back(); }
  bool all_ended() const {
    for (const auto& process : processes_)
      if (!process->ended()) return false;
    return true;
  }

  /// That its processes were part of.
  std::uint32_t generation_count() const {
    std::uint32_t count = 0;
    for (const auto& process : processes_) count += process->generation_count();
    return count;
  }

  /// The last processes.
  std::string describe() const {
    std::string text;
    for (std::size_t i = processes_.size() > kDescribed ? processes_.size() - kDescribed : 0; i < processes_.size();
         ++i)
      text += processes_[i]->describe();
    return text;
  }

 private:
  static constexpr std::size_t kDescribed = 3;

  void begin_process() {
    processes_.push_back(std::make_unique<SimulatedWorker>(cluster_, slot_));
    threads_.emplace_back(processes_.back()->name(), [process = processes_.back().get()] { process->run(); });
  }

  SimulatedCluster& cluster_;
  const int slot_;
  std::vector<std::unique_ptr<SimulatedWorker>> processes_;
  std::vector<Thread> threads_;
};

}  // namespace poseidon::testing
