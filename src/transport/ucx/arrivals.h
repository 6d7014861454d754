// Arrivals: received messages, in the order in which they were sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <utility>

#include "base/invariant.h"
#include "base/one_thread.h"
#include "wire/header.h"

namespace poseidon::ucx {

struct Arrival {
  wire::Header header;
  void* data = nullptr;     // from UCX: the payload, or a handle until it is received; null: no payload
  bool rendezvous = false;  // the payload is still with its sender
};

/// Restores the order of messages, which UCX does not keep between messages that it sends in different ways. Only one
/// thread uses it.
class Arrivals {
 public:
  /// Returns false for a number that has come already, and for one that is further ahead than any sender can be.
  bool insert(std::uint64_t sequence, const Arrival& arrival) {
    one_thread_.check();
    if (sequence < next_ || sequence - next_ >= kWindow) return false;
    const auto index = static_cast<std::size_t>(sequence - next_);
    if (index >= waiting_.size()) waiting_.resize(index + 1);
    if (waiting_[index]) return false;
    waiting_[index] = arrival;
    return true;
  }

  /// Returns the next message if it is here, and null otherwise.
  const Arrival* front() const {
    return one_thread_.checked(waiting_).empty() || !waiting_.front() ? nullptr : &*waiting_.front();
  }

  /// Takes the message that front() returns.
  Arrival take() {
    one_thread_.check();
    invariant(!waiting_.empty() && waiting_.front().has_value(), "a message is taken that front() has returned");
    const Arrival arrival = *waiting_.front();
    waiting_.pop_front();
    ++next_;
    return arrival;
  }

  /// Returns the number of the message that front() returns or waits for.
  std::uint64_t next() const { return one_thread_.checked(next_); }

  /// Takes all messages. An entry is empty if its message has not come.
  std::deque<std::optional<Arrival>> take_all() { return std::exchange(one_thread_.checked(waiting_), {}); }

 private:
  static constexpr std::uint64_t kWindow = std::uint64_t{1} << 20;  // in messages
  std::uint64_t next_ = 0;
  std::deque<std::optional<Arrival>> waiting_;  // waiting_[0] has the number next_
  [[no_unique_address]] OneThread one_thread_{"Arrivals"};
};

}  // namespace poseidon::ucx
