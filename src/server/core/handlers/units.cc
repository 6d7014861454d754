// units: describes the units whose values the servers keep.
#include "server/core/connection.h"
#include "server/core/server_core.h"

namespace poseidon {

Status ServerCore::Handlers::units(ServerCore& /*core*/, Connection& from, const wire::Header& /*header*/,
                                   std::span<const std::byte> payload) {
  return from.job->shard_of_values().describe_units(payload);
}

}  // namespace poseidon
