// abort: the worker has failed.
#include <cstdint>
#include <optional>
#include <utility>

#include "plan/mesh.h"
#include "server/core/connection.h"
#include "server/core/server_core.h"

namespace poseidon {

/// In large jobs not every worker is connected to the one that has failed. So the server passes on the first one's
/// reason. Otherwise others would only learn that somebody has left.
Status ServerCore::Handlers::abort(ServerCore& core, Connection& from, const wire::Header& header,
                                   std::span<const std::byte> payload) {
  from.left = true;
  core.remember_open_chunks(*from.job);
  if (from.job->worker_count <= kFullMesh || std::exchange(from.job->passed_on, true)) return {};
  const wire::TextMessage message = wire::Abort::read(header, payload).make();
  std::optional<std::uint32_t> told;  // the connections are in the order of their ranks
  for (Connection* other : from.job->connections) {
    if (other->left || other->rank == told) continue;
    told = other->rank;
    other->send_text(message, [] {});
  }
  return {};
}

}  // namespace poseidon
