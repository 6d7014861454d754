// PortWatch: shares a dedicated server's port among its workers where a switch loses packets (port_share.h).
#pragma once

#include <chrono>
#include <cstdint>
#include <map>

#include "server/core/port_share.h"
#include "transport/transport.h"

namespace poseidon {

/// Only the loop's thread uses it.
class PortWatch {
 public:
  /// The loop must outlive this.
  explicit PortWatch(Loop& loop) : loop_(loop) {}

  /// A connection has come, under a number of its own.
  void add(std::uint64_t id, Flow& flow);
  /// Its worker has said hello, and is told its rate from now on.
  void joined(std::uint64_t id);
  /// It has closed.
  void remove(std::uint64_t id);
  /// Something comes in. Looks at the port for as long as that is so.
  void watch();

 private:
  struct User {
    Flow* flow = nullptr;
    bool joined = false;
    Flow::Delivery delivery{};  // at the last look
    std::uint64_t rate = 0;     // the worker's share of the port in bytes a second; 0: no limit
  };
  bool look(std::chrono::nanoseconds length);
  static void share(User& user, std::uint64_t bytes_per_second);

  Loop& loop_;
  std::map<std::uint64_t, User> users_;
  PortShare port_share_;
  bool watched_ = false;  // a timer runs
};

}  // namespace poseidon
