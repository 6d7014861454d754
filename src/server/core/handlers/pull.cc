// pull: asks for an array that the server keeps.
#include "server/core/connection.h"
#include "server/core/server_core.h"

namespace poseidon {

Status ServerCore::Handlers::pull(ServerCore& core, Connection& from, const wire::Header& header,
                                  std::span<const std::byte> /*payload*/) {
  const auto shard = core.values_of(from, header);
  return shard.ok() ? shard.value()->pull(from.job->inner(header), from) : shard.status();
}

}  // namespace poseidon
