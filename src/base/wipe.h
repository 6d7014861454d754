// Removes secrets from memory that is no longer used.
#pragma once

#include <string.h>

#include <cstddef>
#include <span>
#include <string>

namespace poseidon {

/// Overwrites the bytes, even if the compiler sees that nobody reads them again.
inline void wipe(std::span<std::byte> secret) { ::explicit_bzero(secret.data(), secret.size()); }

/// Overwrites the text and leaves an empty string.
inline void wipe(std::string& secret) {
  wipe(std::as_writable_bytes(std::span(secret)));
  secret.clear();
}

}  // namespace poseidon
