// How a client lets the servers hold back what is less urgent (right_of_way.h).
#include <utility>

#include "client/client_impl.h"
#include "wire/messages/hold.h"

namespace poseidon {

/// Whether what comes over the connection takes a part of this machine's port that servers may leave to others.
bool ClientImpl::shares_port(const LinkState& link) const {
  const auto& links = connections_.links();
  return link.kind == LinkKind::server && link.known() && links.class_count > 1 && !links.server_is_local[link.index];
}

/// A part of a payload has come.
void ClientImpl::note_part(const LinkState& link, std::size_t size_bytes) {
  if (shares_port(link)) right_of_way_.arrived(size_bytes, link.last_sign_ns);
}

/// A payload has begun to come over the network, or ended. Only what somebody has asked for is urgent. Results come
/// from all servers at once, and the ports idle if some of them wait: AlexNet with overlap was 1.2 % slower.
void ClientImpl::note_payload(const LinkState& link, bool begins) {
  if (!shares_port(link)) return;
  const bool first_class = link.lane % connections_.links().class_count == 0;
  const bool urgent = first_class && link.receiving.kind == wire::Kind::value;
  if (first_class && !urgent) return;
  if (begins)
    right_of_way_.begin(urgent, link.receiving.payload_bytes);
  else
    right_of_way_.end(urgent, link.receiving.payload_bytes);
  look_at_way();
}

void ClientImpl::look_at_way() {
  switch (right_of_way_.look(now_ns())) {
    case RightOfWay::Change::none:
      return;
    case RightOfWay::Change::hold:
      tell_to_hold(RightOfWay::kTime);
      return watch_way();
    case RightOfWay::Change::release:
      return tell_to_hold({});
  }
}

/// Looks again and again while the servers hold.
void ClientImpl::watch_way() {
  if (std::exchange(watches_way_, true)) return;
  loop_->call_at(Clock::now() + RightOfWay::kInterval, [this] {
    watches_way_ = false;
    if (closing_ || !right_of_way_.holds()) return;
    look_at_way();
    if (!right_of_way_.holds()) return;
    tell_to_hold(RightOfWay::kTime);
    watch_way();
  });
}

void ClientImpl::tell_to_hold(std::chrono::microseconds time) {
  connections_.tell_servers(wire::Hold{static_cast<std::uint64_t>(time.count())}.make());
}

}  // namespace poseidon
