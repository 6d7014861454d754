// assign: sets an array that the server keeps.
#include "server/core/connection.h"
#include "server/core/server_core.h"

namespace poseidon {

Status ServerCore::Handlers::assign(ServerCore& core, Connection& from, const wire::Header& header,
                                    std::span<const std::byte> payload) {
  const auto shard = core.values_of(from, header);
  return shard.ok() ? shard.value()->assign(from.job->inner(header), payload) : shard.status();
}

}  // namespace poseidon
