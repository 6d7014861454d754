// Random bytes that nobody can guess.
#pragma once

#include <cstddef>
#include <span>

namespace poseidon {

/// Fills `out` (at most 256 bytes) from the kernel's generator. Aborts where there is none: nothing that needs it would
/// be safe without.
void fill_with_random_bytes(std::span<std::byte> out);

}  // namespace poseidon
