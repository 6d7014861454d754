// assign, pull, restore, rule and units: the values that the server keeps.
#include "server/core/connection.h"
#include "server/core/server_core.h"

namespace poseidon {

Status ServerCore::Handlers::assign(ServerCore& core, Connection& from, const wire::Header& header,
                                    std::span<const std::byte> payload) {
  const auto shard = core.values_of(from, header);
  return shard.ok() ? shard.value()->assign(from.job->inner(header), payload) : shard.status();
}

Status ServerCore::Handlers::pull(ServerCore& core, Connection& from, const wire::Header& header,
                                  std::span<const std::byte> /*payload*/) {
  const auto shard = core.values_of(from, header);
  return shard.ok() ? shard.value()->pull(from.job->inner(header), from) : shard.status();
}

/// What the newest checkpoint has for a chunk.
Status ServerCore::Handlers::restore(ServerCore& core, Connection& from, const wire::Header& header,
                                     std::span<const std::byte> /*payload*/) {
  const auto shard = core.values_of(from, header);
  return shard.ok() ? shard.value()->restore(from.job->inner(header), from) : shard.status();
}

/// How a unit's parameters are updated from a step on.
Status ServerCore::Handlers::rule(ServerCore& core, Connection& from, const wire::Header& header,
                                  std::span<const std::byte> payload) {
  const auto shard = core.values_of(from, header);
  return shard.ok() ? shard.value()->set_rule(from.job->inner(header), payload) : shard.status();
}

Status ServerCore::Handlers::units(ServerCore& /*core*/, Connection& from, const wire::Header& /*header*/,
                                   std::span<const std::byte> payload) {
  return from.job->shard_of_values().describe_units(payload);
}

}  // namespace poseidon
