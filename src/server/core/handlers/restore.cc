// restore: asks for what the newest checkpoint has for a chunk.
#include "server/core/connection.h"
#include "server/core/server_core.h"

namespace poseidon {

Status ServerCore::Handlers::restore(ServerCore& core, Connection& from, const wire::Header& header,
                                     std::span<const std::byte> /*payload*/) {
  const auto shard = core.values_of(from, header);
  return shard.ok() ? shard.value()->restore(from.job->inner(header), from) : shard.status();
}

}  // namespace poseidon
