#include "client/downlink_priority.h"

#include <utility>

#include "base/clock.h"
#include "wire/messages/sending.h"

namespace poseidon {

void DownlinkPriority::end() { loop_.checked(ended_) = true; }

/// Whether what comes over the connection takes a part of this machine's port that servers may leave to others.
bool DownlinkPriority::shares_port(const LinkState& link) const {
  const auto& links = connections_.links();
  return link.kind == LinkKind::server && link.known() && links.class_count > 1 && !links.server_is_local[link.index];
}

void DownlinkPriority::note_part(const LinkState& link, std::size_t size_bytes) {
  loop_.check_thread();
  if (shares_port(link)) right_of_way_.arrived(size_bytes, link.last_sign_ns);
}

/// Only what somebody has asked for is urgent. Results come from all servers at once, and the ports idle if some of
/// them wait: AlexNet with overlap was 1.2 % slower.
void DownlinkPriority::note_payload(const LinkState& link, bool begins) {
  loop_.check_thread();
  if (!shares_port(link)) return;
  const bool first_class = link.lane % connections_.links().class_count == 0;
  const bool urgent = first_class && link.receiving.kind == wire::Kind::value;
  if (first_class && !urgent) return;
  if (begins)
    right_of_way_.begin(urgent, link.receiving.payload_bytes);
  else
    right_of_way_.end(urgent, link.receiving.payload_bytes);
  look();
}

void DownlinkPriority::look() {
  switch (right_of_way_.look(now_ns())) {
    case RightOfWay::Change::none:
      return;
    case RightOfWay::Change::hold:
      tell_to_hold(RightOfWay::kTime);
      return look_again();
    case RightOfWay::Change::release:
      return tell_to_hold({});
  }
}

/// Looks again and again while the servers hold.
void DownlinkPriority::look_again() {
  if (std::exchange(looks_again_, true)) return;
  loop_.call_at(Clock::now() + RightOfWay::kInterval, [this] {
    looks_again_ = false;
    if (ended_ || !right_of_way_.holds()) return;
    look();
    if (!right_of_way_.holds()) return;
    tell_to_hold(RightOfWay::kTime);
    look_again();
  });
}

void DownlinkPriority::tell_to_hold(std::chrono::microseconds time) {
  connections_.tell_servers(wire::Hold{static_cast<std::uint64_t>(time.count())}.make());
}

}  // namespace poseidon
