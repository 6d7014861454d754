#include "transport/tcp/host_queue.h"

#include <linux/sock_diag.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <utility>

namespace poseidon::tcp {

namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// 4 ms of a port of 31.25 Mb/s, on which 8 and 32 KiB did as well.
constexpr std::size_t kLeastBytes = std::size_t{16} << 10;
// A connection that may send at all sends two full packets: fewer would cost too many calls.
constexpr std::size_t kLeastRoomBytes = 3'000;
constexpr milliseconds kWindow{30};
// Control messages and buffers are urgent, too, and travel also where no gradient is. There the limit would only cost:
// wait-free backpropagation alone, bound by ports of 15.6 Mb/s, was 2.5 % slower with it.
constexpr std::size_t kLeastUrgentBytes = std::size_t{64} << 10;
constexpr std::size_t kLeastUrgentPart = 32;  // one of so many bytes
constexpr std::chrono::seconds kHalfLife{5};
// A look at one connection takes about 0.15 µs.
constexpr microseconds kLookInterval{500};
constexpr microseconds kLookIntervalPerSocket{20};

/// What the connection has handed to the port and the port has not sent. 0 where no queue tells its sender.
std::size_t queued_bytes_of(int socket) {
  std::array<std::uint32_t, SK_MEMINFO_VARS> values{};
  socklen_t size = sizeof(values);
  if (::getsockopt(socket, SOL_SOCKET, SO_MEMINFO, values.data(), &size) != 0) return 0;
  return values[SK_MEMINFO_WMEM_ALLOC];
}

}  // namespace

void QueueLimit::look(Clock::time_point now, std::size_t queued_bytes, std::size_t left_bytes, bool refused) {
  most_left_bytes_ = std::max(most_left_bytes_, left_bytes);
  if (queued_bytes == 0) {
    if (refused) bytes_ = std::min(bytes_ + bytes_ / 4, kMostBytes);
  } else if (now - window_begin_ < kWindow) {
    return;
  } else {  // it was never empty
    bytes_ = std::clamp(2 * most_left_bytes_, kLeastBytes, bytes_);
  }
  most_left_bytes_ = 0;
  window_begin_ = now;
}

HostQueue& HostQueue::of_process() {
  static HostQueue& queue = *new HostQueue;  // connections may close while the process ends
  return queue;
}

HostQueue::Member::Member(int socket, bool yields) : socket_(socket), yields_(yields) {
  HostQueue& queue = of_process();
  const std::lock_guard lock(queue.mutex_);
  queue.sockets_.push_back(socket_);
}

HostQueue::Member::~Member() {
  HostQueue& queue = of_process();
  const std::lock_guard lock(queue.mutex_);
  std::erase(queue.sockets_, socket_);
}

std::size_t HostQueue::Member::room() const {
  return yields_ ? of_process().room() : std::numeric_limits<std::size_t>::max();
}

void HostQueue::Member::add(std::size_t bytes) const { of_process().add(bytes, yields_); }

void HostQueue::add(std::size_t bytes, bool yields) {
  const std::lock_guard lock(mutex_);
  queued_bytes_ += bytes;
  (yields ? yielding_bytes_ : urgent_bytes_) += bytes;
  const auto now = Clock::now();
  if (now < next_halving_) return;
  next_halving_ = now + kHalfLife;
  yielding_bytes_ /= 2;
  urgent_bytes_ /= 2;
}

std::size_t HostQueue::room() {
  const std::lock_guard lock(mutex_);
  if (urgent_bytes_ < std::max(kLeastUrgentBytes, yielding_bytes_ / kLeastUrgentPart))
    return std::numeric_limits<std::size_t>::max();
  if (const auto now = Clock::now(); now >= next_look_) look(now);
  if (queued_bytes_ < limit_.bytes()) return std::max(limit_.bytes() - queued_bytes_, kLeastRoomBytes);
  refused_ = true;
  return 0;
}

void HostQueue::look(Clock::time_point now) {
  std::size_t found_bytes = 0;
  for (const int socket : sockets_) found_bytes += queued_bytes_of(socket);
  const std::size_t left_bytes = queued_bytes_ - std::min(queued_bytes_, found_bytes);
  limit_.look(now, found_bytes, left_bytes, std::exchange(refused_, false));
  queued_bytes_ = found_bytes;
  next_look_ = now + std::max<Clock::duration>(kLookInterval, kLookIntervalPerSocket * sockets_.size());
}

}  // namespace poseidon::tcp
