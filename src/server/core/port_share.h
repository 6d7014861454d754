// PortShare: how fast each worker may send to a server, and the server to each worker, where a switch loses packets.
//
// A switch with little memory cannot hold what many workers send to one port at once. TCP then has so few packets on
// its way that it notices a loss only when a timer ends, and the port idles. Who sends evenly, each its share of the
// port, loses next to nothing (docs/decisions/0035-port-share.md). Only the server sees what all of them do to its
// port.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "base/one_thread.h"

namespace poseidon {

/// Only the thread of its core's loop uses it.
class PortShare {
 public:
  /// How often update() wants to be called while something comes in.
  static constexpr std::chrono::milliseconds kWindow{50};
  /// With fewer senders each has enough packets on its way for TCP's own repair.
  static constexpr std::size_t kFewestSenders = 4;
  /// A larger share of lost packets, over some windows, is more than TCP causes when it looks for its rate.
  static constexpr double kMostLoss = 0.02;
  /// Fewer are a chance, or a reader that pauses.
  static constexpr double kFewestLost = 32;

  /// What happened on a core's connections together since the last look.
  struct Window {
    std::chrono::nanoseconds length{0};
    std::uint64_t received_bytes = 0;
    std::uint64_t packets = 0;
    std::uint64_t lost_packets = 0;
    std::size_t sender_count = 0;  // connections that brought something
  };

  /// Takes in one window. Returns the share of each connection from now on, in bytes a second; 0: no limit.
  std::uint64_t update(const Window& window);

 private:
  void follow(double rate, double loss);
  std::size_t senders() const { return *std::max_element(recent_senders_.begin(), recent_senders_.end()); }

  double packets_ = 0;        // of the last windows, later ones count more
  double lost_packets_ = 0;   // the same
  double most_received_ = 0;  // bytes a second, in the best window
  double port_rate_ = 0;      // bytes a second for all together; 0: nothing is known
  double step_ = 0;           // the share by which the rate grows next
  int full_windows_ = 0;      // without loss, since the rate changed
  // Of the last windows. Soon after some senders have ended, the others have their share.
  std::array<std::size_t, 4> recent_senders_{};
  std::size_t next_ = 0;  // in recent_senders_
  [[no_unique_address]] OneThread one_thread_{"PortShare"};
};

}  // namespace poseidon
