// rule: how a unit's parameters are updated from a step on.
#include "server/core/connection.h"
#include "server/core/server_core.h"

namespace poseidon {

Status ServerCore::Handlers::rule(ServerCore& core, Connection& from, const wire::Header& header,
                                  std::span<const std::byte> payload) {
  const auto shard = core.values_of(from, header);
  return shard.ok() ? shard.value()->set_rule(from.job->inner(header), payload) : shard.status();
}

}  // namespace poseidon
