#include "server/core/port_watch.h"

#include <utility>

#include "base/clock.h"
#include "wire/messages/sending.h"

namespace poseidon {

void PortWatch::add(std::uint64_t id, Flow& flow) { loop_.checked(users_).emplace(id, User{.flow = &flow}); }

void PortWatch::joined(std::uint64_t id) {
  loop_.check_thread();
  if (const auto user = users_.find(id); user != users_.end()) user->second.joined = true;
}

void PortWatch::remove(std::uint64_t id) { loop_.checked(users_).erase(id); }

void PortWatch::watch() {
  loop_.check_thread();
  if (std::exchange(watched_, true)) return;
  const auto since = Clock::now();
  loop_.call_at(since + PortShare::kWindow, [this, since] {
    watched_ = false;
    if (look(Clock::now() - since)) watch();
  });
}

/// Returns whether something has come in.
bool PortWatch::look(std::chrono::nanoseconds length) {
  PortShare::Window window{.length = length};
  for (auto& [id, user] : users_) {
    const Flow::Delivery now = user.flow->delivery();
    const Flow::Delivery before = std::exchange(user.delivery, now);
    if (now.packets < before.packets) continue;  // it has closed, or the kernel's count begins again
    window.received_bytes += now.received_bytes - before.received_bytes;
    window.packets += now.packets - before.packets;
    window.lost_packets += now.lost_packets - before.lost_packets;
    if (now.received_bytes != before.received_bytes) ++window.sender_count;
  }
  const std::uint64_t rate = port_share_.update(window);
  for (auto& [id, user] : users_) share(user, rate);
  return window.received_bytes > 0;
}

/// Tells the worker its rate, unless it knows it.
void PortWatch::share(User& user, std::uint64_t bytes_per_second) {
  if (!user.joined || std::exchange(user.rate, bytes_per_second) == bytes_per_second) return;
  user.flow->limit_rate(bytes_per_second);
  user.flow->send(wire::Rate{bytes_per_second}.make(), {}, [](const Status&) {});
}

}  // namespace poseidon
