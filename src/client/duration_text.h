// How messages and notices of a client give durations.
#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <string>

namespace poseidon {

/// Text such as "12 ms" or "31.2 s".
inline std::string duration_text(std::int64_t duration_ns) {
  std::array<char, 32> text{};
  if (duration_ns < 1'000'000'000)
    std::snprintf(text.data(), text.size(), "%lld ms", static_cast<long long>(duration_ns / 1'000'000));
  else
    std::snprintf(text.data(), text.size(), "%.1f s", static_cast<double>(duration_ns) / 1e9);
  return text.data();
}

}  // namespace poseidon
