#include "poseidon/measure.h"

#include <algorithm>
#include <array>
#include <functional>

#include "base/buffer.h"
#include "base/clock.h"
#include "base/invariant.h"
#include "plan/priority.h"
#include "poseidon/plan.h"
#include "transport/level_queue.h"

namespace poseidon {

namespace {

/// A message in a flow's queue (transport/tcp/send_queue.h).
struct Waiting {
  std::array<std::byte, wire::kHeaderBytes> header{};
  Pieces payload;
  std::function<void(const Status&)> done;
};

}  // namespace

double scheduling_seconds(std::size_t chunk_count, std::size_t layer_count) {
  constexpr int class_count = 2;
  constexpr double threshold = 0.5;
  layer_count = std::clamp<std::size_t>(layer_count, 1, std::max<std::size_t>(chunk_count, 1));
  PriorityMap map(class_count);
  for (std::size_t layer = 0; layer < layer_count; ++layer) {
    const double urgency = 1 - static_cast<double>(layer) / static_cast<double>(layer_count);
    map.set(static_cast<std::uint32_t>(layer),
            {level_of(urgency), static_cast<std::uint8_t>(priority_class(urgency, threshold, class_count))});
  }
  std::array<LevelQueue<Waiting>, class_count> queues;
  const std::array<std::byte, 64> memory{};
  std::size_t sent = 0;
  const std::int64_t begun_ns = now_ns();
  for (std::size_t chunk = 0; chunk < chunk_count; ++chunk) {
    const std::size_t layer = layer_count - 1 - chunk * layer_count / chunk_count;
    const Priority priority = map.of(static_cast<std::uint32_t>(layer));
    Waiting waiting;
    waiting.payload.emplace_back(memory);
    waiting.done = [&sent](const Status&) { ++sent; };
    queues[priority.priority_class].push(priority.level, std::move(waiting));
  }
  for (auto& queue : queues)
    while (!queue.empty()) queue.pop().done(Status());
  const std::int64_t ended_ns = now_ns();
  invariant(sent == chunk_count, "a queue gives back all that was put into it");
  return static_cast<double>(ended_ns - begun_ns) * 1e-9;
}

}  // namespace poseidon
