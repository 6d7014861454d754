// How a rank leaves its job.
#include <algorithm>
#include <chrono>
#include <utility>

#include "base/thread.h"
#include "client/client_impl.h"
#include "wire/messages/ending.h"

namespace poseidon {

namespace {

constexpr auto kContributionLook = std::chrono::milliseconds(5);

bool contributes(const Exchange& exchange) { return exchange.progress.running && exchange.push() != nullptr; }

}  // namespace

void ClientImpl::stop_in_order() {
  loop_->check_thread();
  stop({ErrorCode::shut_down, "the client has been shut down; connect again before further calls"},
       wire::Goodbye::make(), std::make_shared<const std::string>(), {});
}

void ClientImpl::shutdown(const std::function<bool()>& keep_waiting, bool serves_on) {
  loop_->check_other_thread();
  if (std::exchange(shut_down_, true)) return;
  const bool had_failed = steps_.failed();
  finish_contributions(keep_waiting);
  end(had_failed, [&] { return serves_on && keep_waiting(); });
}

/// Whether a contribution that has started is still being made.
bool ClientImpl::still_contributes() {
  return loop_->call([this] {
    const auto contributes_yet = [](const auto& unit) {
      const Progress& progress = unit.second->syncer.exchange().progress;
      return progress.running && progress.contributing;
    };
    return !closing_ && (!waiting_for_peers_.empty() || std::ranges::any_of(units_by_id_, contributes_yet));
  });
}

/// Waits for the other ranks' parts of every step of which they have this rank's part. A rank that is late then still
/// finds this rank and its server. The goodbye comes first, after what this rank has begun to contribute: a step that
/// lacks this rank's part fails at once.
void ClientImpl::finish_contributions(const std::function<bool()>& keep_waiting) {
  Wait wait{keep_waiting};
  loop_->call([this] { leaving_ = !closing_; });
  while (still_contributes()) {
    look(wait);
    pause_for(kContributionLook);
  }
  loop_->call([this] {
    if (closing_) return;
    const auto owed = std::ranges::count_if(
        units_by_id_, [](const auto& unit) { return contributes(unit.second->syncer.exchange()); });
    if (owed == 0) return;
    connections_.say_goodbye();
    steps_.await_contributions(static_cast<std::size_t>(owed));
  });
  // However it ends: this rank's program has ended, and the others learn of a failure themselves.
  steps_.wait_contributions([&] { look(wait); });
}

/// Closes all connections and ends the parts. `had_failed`: the job has, so that nobody waits for the server.
void ClientImpl::end(bool had_failed, const std::function<bool()>& keep_serving) {
  connections_.stop_accepting();
  loop_->call([this] { stop_in_order(); });
  // A send ends at the latest when its flow closes, after kLinger. A product ends when it is computed.
  steps_.wait_closed(2 * Connections::kLinger);
  report_.wait();
  if (!had_failed) parts_->serve_on(keep_serving);
  parts_->shutdown(had_failed);
}

}  // namespace poseidon
