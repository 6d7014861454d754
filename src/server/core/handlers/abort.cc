// abort: the worker has failed.
#include "server/core/connection.h"
#include "server/core/server_core.h"

namespace poseidon {

Status ServerCore::Handlers::abort(ServerCore& core, Connection& from, const wire::Header& /*header*/,
                                   std::span<const std::byte> /*payload*/) {
  from.left = true;
  core.remember_open_chunks(*from.job);
  return {};
}

}  // namespace poseidon
