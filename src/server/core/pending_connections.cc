#include "server/core/pending_connections.h"

#include <utility>

namespace poseidon {

void PendingConnections::add(std::uint64_t id, Flow& flow) {
  loop_.check_thread();
  by_id_.emplace(id, Pending{.flow = &flow});
  if (by_id_.size() > most_) dismiss_oldest();
  watch();
}

void PendingConnections::remove(std::uint64_t id) { loop_.checked(by_id_).erase(id); }

void PendingConnections::dismiss_oldest() {
  by_id_.begin()->second.flow->close(std::chrono::milliseconds(0));
  by_id_.erase(by_id_.begin());
}

void PendingConnections::watch() {
  if (by_id_.empty() || std::exchange(watched_, true)) return;
  loop_.call_at(by_id_.begin()->second.since + patience_, [this] {
    watched_ = false;
    const auto latest = Clock::now() - patience_;
    while (!by_id_.empty() && by_id_.begin()->second.since <= latest) dismiss_oldest();
    watch();
  });
}

}  // namespace poseidon
