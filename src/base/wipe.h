// What is secret does not stay in memory that is no longer used.
#pragma once

#include <string.h>

#include <cstddef>
#include <span>
#include <string>

namespace poseidon {

/// Also where the compiler sees that nobody reads it again.
inline void wipe(std::span<std::byte> secret) { ::explicit_bzero(secret.data(), secret.size()); }

/// Leaves an empty string.
inline void wipe(std::string& secret) {
  wipe(std::as_writable_bytes(std::span(secret)));
  secret.clear();
}

}  // namespace poseidon
