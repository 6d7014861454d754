#include "scheme/push_window.h"

#include <algorithm>
#include <utility>

#include "base/invariant.h"

namespace poseidon {

PushWindow::PushWindow(Loop& loop, std::size_t limit_bytes)
    : loop_(loop), least_limit_bytes_(limit_bytes), limit_bytes_(limit_bytes) {}

bool PushWindow::has_room(std::uint16_t level) const {
  std::size_t bytes = 0;
  for (auto other = awaited_bytes_.begin(); other != awaited_bytes_.end() && other->first <= level; ++other)
    bytes += other->second;
  return open_ || bytes < factor_ * limit_bytes_ || awaited_.size() < kLeastPushes;
}

void PushWindow::set_round_trip(std::chrono::nanoseconds round_trip) {
  loop_.check_thread();
  if (round_trip.count() > 0 && (round_trip_.count() == 0 || round_trip < round_trip_)) round_trip_ = round_trip;
}

void PushWindow::push(Id id, std::uint16_t level, std::size_t size_bytes, Send send) {
  loop_.check_thread();
  waiting_.push(level, {id, level, size_bytes, std::move(send)});
  send_soon();
}

/// Several units often start together, the least urgent first. All of them are here before the first is sent.
void PushWindow::send_soon() {
  if (std::exchange(sends_soon_, true)) return;
  loop_.post([this] {
    sends_soon_ = false;
    send_waiting();
  });
}

void PushWindow::send_waiting() {
  while (!waiting_.empty()) {
    // The less urgent ones have no more room than the first.
    if (!has_room(waiting_.first().level)) return watch();
    const Waiting next = waiting_.pop();
    if (!open_) {
      awaited_[key_of(next.id)] = {next.level, next.size_bytes, Clock::now()};
      awaited_bytes_[next.level] += next.size_bytes;
    }
    next.send(true);
  }
}

void PushWindow::answered(Id id) {
  loop_.check_thread();
  const auto found = awaited_.find(key_of(id));
  if (found == awaited_.end()) return;
  const std::size_t size_bytes = found->second.size_bytes;
  last_result_ = Clock::now();
  learn(last_result_ - found->second.sent);
  adapt(last_result_ - found->second.sent, size_bytes);
  const auto level = awaited_bytes_.find(found->second.level);
  invariant(level != awaited_bytes_.end() && size_bytes <= level->second,
            "an awaited push fills the window until then");
  level->second -= size_bytes;
  if (level->second == 0) awaited_bytes_.erase(level);
  awaited_.erase(found);
  factor_ = 1;
  send_waiting();
}

void PushWindow::open() {
  loop_.check_thread();
  open_ = true;
  send_waiting();
}

void PushWindow::drop() {
  loop_.check_thread();
  open_ = true;
  while (!waiting_.empty()) waiting_.pop().send(false);
}

/// The mean and its deviation, as TCP estimates round trips (RFC 6298).
void PushWindow::learn(std::chrono::nanoseconds taken) {
  if (usual_.count() == 0) {
    usual_ = taken;
    variation_ = taken / 2;
    return;
  }
  variation_ += (std::chrono::abs(taken - usual_) - variation_) / 4;
  usual_ += (taken - usual_) / 8;
}

/// Moves the limit towards what the path holds, twice over, beside the least one: all the way in the time of a window.
void PushWindow::adapt(std::chrono::nanoseconds taken, std::size_t answered_bytes) {
  const double limit = static_cast<double>(limit_bytes_);
  const double least = static_cast<double>(least_limit_bytes_);
  const double target = least + 2 * limit * static_cast<double>(round_trip_.count()) /
                                    static_cast<double>(std::max<std::int64_t>(taken.count(), 1));
  if (target > limit && waiting_.empty()) return;  // it is not the window that keeps the port from being full
  const double share = std::min(1.0, static_cast<double>(answered_bytes) / limit);
  limit_bytes_ = static_cast<std::size_t>(limit + (target - limit) * share);
}

std::chrono::nanoseconds PushWindow::patience() const {
  if (usual_.count() == 0) return kFirstPatience;
  return std::clamp<std::chrono::nanoseconds>(usual_ + 4 * variation_, kLeastPatience, kMostPatience);
}

void PushWindow::watch() {
  if (std::exchange(watching_, true)) return;
  loop_.call_at(Clock::now() + patience(), [this] { look(); });
}

void PushWindow::look() {
  watching_ = false;
  if (waiting_.empty()) return;
  if (Clock::now() - last_result_ >= patience()) factor_ *= 2;
  send_waiting();
}

}  // namespace poseidon
