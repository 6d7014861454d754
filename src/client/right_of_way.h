// RightOfWay: decides when the servers hold back what is less urgent, while something urgent comes to this worker.
//
// A plain switch sends what it has in the order in which it came. So an urgent result and a large one from another
// server each get half of this worker's port. Only this worker sees both (docs/decisions/0040-right-of-way.md).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

#include "base/invariant.h"
#include "base/one_thread.h"
#include "client/arrival_rate.h"

namespace poseidon {

/// Only the thread of the client's loop uses it. Times are those of now_ns().
class RightOfWay {
 public:
  /// How often look() wants to be called while it holds.
  static constexpr std::chrono::milliseconds kInterval{20};
  /// How long the servers hold if they are not told again.
  static constexpr std::chrono::milliseconds kTime{60};

  enum class Change : std::uint8_t { none, hold, release };

  /// Notes what has come over the network, urgent or not.
  void arrived(std::size_t size_bytes, std::int64_t time_ns) { one_thread_.checked(rate_).add(size_bytes, time_ns); }
  /// A payload of a server begins to come, or has ended: whole, or with its connection.
  void begin(bool urgent, std::uint64_t size_bytes) {
    one_thread_.check();
    (urgent ? urgent_bytes_ : other_bytes_) += size_bytes;
  }
  void end(bool urgent, std::uint64_t size_bytes) {
    one_thread_.check();
    std::uint64_t& begun = urgent ? urgent_bytes_ : other_bytes_;
    invariant(size_bytes <= begun, "only a payload that has begun ends");
    begun -= size_bytes;
  }
  bool holds() const { return one_thread_.checked(since_ns_) != 0; }

  /// What changes now.
  Change look(std::int64_t time_ns);

 private:
  Change release();

  ArrivalRate rate_;
  std::uint64_t urgent_bytes_ = 0;  // of payloads that have begun
  std::uint64_t other_bytes_ = 0;
  std::int64_t since_ns_ = 0;  // when it last looked while it held; 0: it does not hold
  std::uint64_t total_ = 0;    // ArrivalRate::total() then
  double before_ = 0;          // bytes a second when both came
  // Since the last proof, while it held:
  std::int64_t held_ns_ = 0;
  double held_bytes_ = 0;
  std::int64_t pause_ns_ = 0;       // after the last time that holding has cost something
  std::int64_t not_before_ns_ = 0;  // when it may hold again
  [[no_unique_address]] OneThread one_thread_{"RightOfWay"};
};

}  // namespace poseidon
