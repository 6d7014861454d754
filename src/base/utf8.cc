#include "base/utf8.h"

#include <cstdint>

namespace poseidon {

std::size_t utf8_sequence_bytes(std::string_view text) {
  const auto byte = [text](std::size_t i) { return static_cast<std::uint8_t>(text[i]); };
  const std::uint8_t lead = byte(0);
  const std::size_t size = lead < 0x80 ? 1 : lead >= 0xc2 && lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
  if ((lead >= 0x80 && lead < 0xc2) || size == 0 || size > text.size()) return 0;
  for (std::size_t i = 1; i < size; ++i)
    if ((byte(i) & 0xc0) != 0x80) return 0;
  if ((lead == 0xe0 && byte(1) < 0xa0) || (lead == 0xed && byte(1) >= 0xa0)) return 0;  // too long; a surrogate
  if ((lead == 0xf0 && byte(1) < 0x90) || (lead == 0xf4 && byte(1) >= 0x90)) return 0;  // too long; past U+10FFFF
  return size;
}

bool is_printable(std::string_view text) {
  while (!text.empty()) {
    const std::size_t size = utf8_sequence_bytes(text);
    const auto first = static_cast<std::uint8_t>(text[0]);
    const bool c1_control = size == 2 && first == 0xc2 && static_cast<std::uint8_t>(text[1]) < 0xa0;
    if (size == 0 || first < 0x20 || first == 0x7f || c1_control) return false;
    text.remove_prefix(size);
  }
  return true;
}

}  // namespace poseidon
