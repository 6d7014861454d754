// Which addresses of this host a process listens on, and which processes are on the same host.
#pragma once

#include <string>
#include <vector>

#include "poseidon/options.h"
#include "poseidon/status.h"

namespace poseidon {

/// The addresses of this host that `options.interfaces` (device names or addresses) ask for, or the
/// one that leads to master_addr. ErrorCode::unreachable where there is none.
Result<std::vector<std::string>> listen_hosts(const Options& options);

/// Tells this process's host from others: the kernel's boot, its network namespace and the user.
std::string host_id();

}  // namespace poseidon
