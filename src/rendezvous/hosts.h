// Which addresses of this host a process listens on, and which processes are on the same host.
#pragma once

#include <string>
#include <vector>

#include "poseidon/options.h"
#include "poseidon/status.h"

namespace poseidon {

/// The addresses of this host that `options.interfaces` names (device names or addresses). Without interfaces it is the
/// address that leads to master_addr. ErrorCode::unreachable: there is none.
Result<std::vector<std::string>> listen_hosts(const Options& options);

/// An id of this process's host, made of the kernel's boot, the network namespace and the user.
std::string host_id();

}  // namespace poseidon
