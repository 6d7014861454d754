// How messages and records name this machine.
#pragma once

#include <string>

namespace poseidon {

/// The machine's name, e.g. "node-17", or "unknown" if the system has none.
std::string host_name();

/// "10.0.0.1:7000" or "[::1]:7000".
std::string host_and_port(const std::string& host, unsigned int port);

/// The kernel's id of this boot. Processes with the same id share the monotonic clock. Empty without /proc.
std::string boot_id();

}  // namespace poseidon
