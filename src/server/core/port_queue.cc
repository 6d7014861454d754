#include "server/core/port_queue.h"

#include <algorithm>

namespace poseidon {

std::optional<std::int64_t> PortQueue::run(std::int64_t time_ns) {
  while (!waiting_.empty() && free_ns_ <= time_ns) {
    const auto next = waiting_.extract(waiting_.begin());
    use(next.key(), next.mapped().size_bytes, time_ns);
    next.mapped().go();
  }
  if (waiting_.empty()) return std::nullopt;
  return free_ns_;
}

void PortQueue::use(double begin, std::size_t size_bytes, std::int64_t time_ns) {
  now_ = begin;
  const std::int64_t earliest_ns = time_ns - std::chrono::nanoseconds(kBurst).count();
  free_ns_ =
      std::max(free_ns_, earliest_ns) + static_cast<std::int64_t>(static_cast<double>(size_bytes) * ns_per_byte_);
}

}  // namespace poseidon
