// How a ServerCore shares its port among its workers (port_share.h).
#include <utility>

#include "base/clock.h"
#include "server/core/connection.h"
#include "server/core/server_core.h"
#include "wire/messages/rate.h"

namespace poseidon {

/// Looks at the port as long as something comes in. An embedded server has as many ports as there are workers.
void ServerCore::watch_port() {
  if (embedded() || std::exchange(port_watched_, true)) return;
  const auto since = Clock::now();
  loop_->call_at(since + PortShare::kWindow, [this, since] {
    port_watched_ = false;
    if (look_at_port(Clock::now() - since)) watch_port();
  });
}

/// Returns whether something has come in.
bool ServerCore::look_at_port(std::chrono::nanoseconds length) {
  PortShare::Window window{.length = length};
  for (auto& entry : connections_) {
    Connection& connection = *entry.second;
    const Flow::Delivery now = connection.flow().delivery();
    const Flow::Delivery before = std::exchange(connection.delivery, now);
    if (now.packets < before.packets) continue;  // it has closed, or the kernel's count begins again
    window.received_bytes += now.received_bytes - before.received_bytes;
    window.packets += now.packets - before.packets;
    window.lost_packets += now.lost_packets - before.lost_packets;
    if (now.received_bytes != before.received_bytes) ++window.sender_count;
  }
  const std::uint64_t rate = port_share_.update(window);
  for (auto& entry : connections_) share_port(*entry.second, rate);
  return window.received_bytes > 0;
}

/// Tells the worker its rate, unless it knows it.
void ServerCore::share_port(Connection& connection, std::uint64_t bytes_per_second) {
  if (connection.job == nullptr || std::exchange(connection.rate, bytes_per_second) == bytes_per_second) return;
  connection.flow().limit_rate(bytes_per_second);
  connection.flow().send(wire::Rate{bytes_per_second}.make(), {}, [](const Status&) {});
}

}  // namespace poseidon
