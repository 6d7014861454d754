// DownlinkPriority: lets the servers hold back what is less urgent while something urgent comes to this worker
// (right_of_way.h; docs/decisions/0040-right-of-way.md).
#pragma once

#include <chrono>
#include <cstddef>

#include "client/connections.h"
#include "client/right_of_way.h"

namespace poseidon {

/// Only the loop's thread uses it.
class DownlinkPriority {
 public:
  /// Both must outlive it.
  DownlinkPriority(Connections& connections, Loop& loop) : connections_(connections), loop_(loop) {}

  /// A part of a payload has come.
  void note_part(const LinkState& link, std::size_t size_bytes);
  /// A payload has begun to come, or ended: whole, or with its connection.
  void note_payload(const LinkState& link, bool begins);
  /// Looks no more: the client ends.
  void end();

 private:
  bool shares_port(const LinkState& link) const;
  void look();
  void look_again();
  void tell_to_hold(std::chrono::microseconds time);

  Connections& connections_;
  Loop& loop_;
  RightOfWay right_of_way_;
  bool looks_again_ = false;  // a timer runs
  bool ended_ = false;
};

}  // namespace poseidon
