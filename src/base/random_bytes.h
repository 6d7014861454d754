// Random bytes that nobody can guess.
#pragma once

#include <cstddef>
#include <span>

namespace poseidon {

/// Fills `out` (at most 256 bytes) from the kernel's generator. Aborts the process if there is none, because nothing
/// that needs it would be safe without. In a simulated world (world.h) the bytes follow from its seed.
void fill_with_random_bytes(std::span<std::byte> out);

}  // namespace poseidon
