// Heartbeats: what a client sends to show that it runs, and what it finds out from those of others: silent ranks
// (vigil.h), and a job whose members all wait for each other (standstill.h).
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "base/clock.h"
#include "base/executor.h"
#include "client/connections.h"
#include "client/failure_report.h"
#include "client/notices.h"
#include "client/standstill.h"
#include "client/steps.h"
#include "client/vigil.h"
#include "poseidon/options.h"

namespace poseidon {

/// Only the loop's thread uses it, except for longest_silence_ns().
class Heartbeats {
 public:
  /// What the heartbeats are about. All must outlive them.
  struct Surroundings {
    const Options& options;
    Connections& connections;
    Steps& steps;
    const FailureReport& report;
    const Executor& executor;
    Notices& notices;
    Loop& loop;
    std::function<bool()> all_take_part;  // whether neither this rank nor another one leaves
    std::function<void(const Status& status, const FailureCause& cause)> fail;
  };
  explicit Heartbeats(Surroundings surroundings);

  /// Begins after this time.
  void begin(std::chrono::milliseconds delay);
  /// Nothing is sent any more: the client ends.
  void end();

  /// A peer's heartbeat has come, with its level.
  void heard(std::size_t rank, std::uint32_t level);
  /// A peer says what it waits for.
  void note_wait(std::size_t rank, std::string waits_for);
  /// What the others wait for (Standstill::others).
  std::string waits_of_others() const;
  /// Connections::longest_silence_ns(), as it was at the last beat. Any thread may ask.
  std::int64_t longest_silence_ns() const { return longest_silence_ns_.load(std::memory_order_relaxed); }

 private:
  void look();
  void beat();
  bool stands() const;
  void tell(const Vigil::Finding& finding);
  void give_up_unreachable();

  const Surroundings around_;
  Vigil vigil_;
  Standstill standstill_;
  std::atomic<std::int64_t> longest_silence_ns_{now_ns()};
  int told_count_ = 0;  // findings of the vigil
  bool beats_ = false;  // whether the last look has sent heartbeats
  bool ended_ = false;
};

}  // namespace poseidon
