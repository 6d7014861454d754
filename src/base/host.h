// This machine, as messages and records name it.
#pragma once

#include <string>

namespace poseidon {

/// The machine's name, e.g. "node-17"; "unknown" where the system tells none.
std::string host_name();

/// The kernel's id of this boot: processes that have the same one share the monotonic clock. Empty without /proc.
std::string boot_id();

}  // namespace poseidon
