// heartbeat: a worker waits, and asks whether this core has something under way for it.
#include <algorithm>

#include "server/core/connection.h"
#include "server/core/server_core.h"
#include "wire/messages/life.h"

namespace poseidon {

/// A core computes on its loop. So nothing is under way but what has been sent and has not arrived.
Status ServerCore::Handlers::heartbeat(ServerCore& /*core*/, Connection& from, const wire::Header& /*header*/,
                                       std::span<const std::byte> /*payload*/) {
  if (from.job == nullptr) return {ErrorCode::refused, "a heartbeat came before the hello"};
  const auto has_arrived = [](Connection* connection) {
    return connection->flow().bytes_delivered() == connection->flow().traffic().bytes_sent;
  };
  const bool idle = std::ranges::all_of(from.job->of_rank(from.rank), has_arrived);
  from.flow().send(wire::Heartbeat{idle ? 0u : 1u}.make(), {}, [](const Status&) {});
  return {};
}

}  // namespace poseidon
