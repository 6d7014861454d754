// Arrivals: messages that have come, in the order in which they were sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <utility>

#include "wire/header.h"

namespace poseidon::ucx {

struct Arrival {
  wire::Header header;
  void* data = nullptr;     // UCX's: the payload, or what stands for it until it is received; null: no payload
  bool rendezvous = false;  // the payload is still with its sender
};

/// UCX keeps no order between messages that it sends in different ways. One thread.
class Arrivals {
 public:
  /// False for a number that has come already, or one further ahead than any sender can be.
  bool insert(std::uint64_t sequence, const Arrival& arrival) {
    if (sequence < next_ || sequence - next_ >= kWindow) return false;
    const auto index = static_cast<std::size_t>(sequence - next_);
    if (index >= waiting_.size()) waiting_.resize(index + 1);
    if (waiting_[index]) return false;
    waiting_[index] = arrival;
    return true;
  }

  /// The next message, if it is here; null otherwise.
  const Arrival* front() const { return waiting_.empty() || !waiting_.front() ? nullptr : &*waiting_.front(); }

  /// Takes what front() shows.
  Arrival take() {
    const Arrival arrival = *waiting_.front();
    waiting_.pop_front();
    ++next_;
    return arrival;
  }

  /// The number of the message that front() shows or waits for.
  std::uint64_t next() const { return next_; }

  /// Empties it, holes and all.
  std::deque<std::optional<Arrival>> take_all() { return std::exchange(waiting_, {}); }

 private:
  static constexpr std::uint64_t kWindow = std::uint64_t{1} << 20;  // messages
  std::uint64_t next_ = 0;
  std::deque<std::optional<Arrival>> waiting_;  // [0] has the number next_
};

}  // namespace poseidon::ucx
