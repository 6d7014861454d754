// Members: every rank tells the others where it listens and what it believes, and checks theirs.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "poseidon/options.h"
#include "poseidon/store.h"

namespace poseidon {

/// Where one worker listens. An address may be several, joined by '|': one for each network transport in use.
struct Member {
  std::string host_id;                        // equal for processes that can share memory
  std::vector<std::string> server_addresses;  // of its embedded server, by core; none with dedicated servers
  std::string peer_address;                   // for factors
  // The same in shared memory; empty where this process does not offer it.
  std::vector<std::string> server_shm_addresses;
  std::string peer_shm_address;
};

/// The addresses of this host that `options.interfaces` (device names or addresses) ask for, or the
/// one that leads to master_addr. ErrorCode::unreachable where there is none.
Result<std::vector<std::string>> listen_hosts(const Options& options);

/// Tells this process's host from others: the kernel's boot, its network namespace and the user.
std::string host_id();

/// Publishes `mine`, waits for all ranks' and returns them by rank. Fails with timeout naming the
/// ranks that never came, or with mismatch naming the rank and the option in which it differs
/// (version, world_size, chunk_bytes, …). `keep_waiting` as in Client::connect.
Result<std::vector<Member>> meet(Store& store, const Options& options, const Member& mine,
                                 const std::function<bool()>& keep_waiting);

}  // namespace poseidon
