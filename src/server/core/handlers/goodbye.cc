// goodbye: the worker leaves of its own accord.
#include "server/core/connection.h"
#include "server/core/server_core.h"

namespace poseidon {

Status ServerCore::Handlers::goodbye(ServerCore& core, Connection& from, const wire::Header& /*header*/,
                                     std::span<const std::byte> /*payload*/) {
  from.said_goodbye = true;
  from.left = true;
  if (from.job != nullptr) core.note_departure(*from.job, from.rank);
  return {};
}

}  // namespace poseidon
