// Bytes as text.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace poseidon {

/// Two lower-case digits for each byte.
inline std::string hexadecimal(std::span<const std::byte> bytes) {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string text;
  for (const std::byte one : bytes) {
    text += digits[std::to_integer<std::size_t>(one >> 4)];
    text += digits[std::to_integer<std::size_t>(one & std::byte{0xf})];
  }
  return text;
}

}  // namespace poseidon
