// Members: every rank tells the others where it listens and what it believes, and checks theirs.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "poseidon/options.h"
#include "poseidon/store.h"

namespace poseidon {

/// Where one worker listens.
struct Member {
  std::string server_address;  // of its embedded shard; empty with dedicated servers
  std::string peer_address;    // for factors
};

/// The address of this host that leads to master_addr, or the one that `options.interface` (a
/// device name or an address) asks for. ErrorCode::unreachable when there is none.
Result<std::string> listen_host(const Options& options);

/// Publishes `mine`, waits for all ranks' and returns them by rank. Fails with timeout naming the
/// ranks that never came, or with mismatch naming the rank and the option in which it differs
/// (version, world_size, chunk_bytes, …). `keep_waiting` as in Client::connect.
Result<std::vector<Member>> meet(Store& store, const Options& options, const Member& mine,
                                 const std::function<bool()>& keep_waiting);

}  // namespace poseidon
