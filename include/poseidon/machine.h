// What of its machine a process may use: the limits of the containers (control groups) that it runs in.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace poseidon {

/// The least limit of memory of the process's control group and of all groups above it, as far as the process sees
/// them. Versions 1 and 2. Empty if there is none. `root` is the folder in which /proc and /sys lie.
std::optional<std::size_t> container_memory_bytes(const std::string& root = "");

/// The same for the time of processors: how many run all the time with the least quota. It may have a fraction.
std::optional<double> container_processors(const std::string& root = "");

}  // namespace poseidon
