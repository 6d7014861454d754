// What a text that came from elsewhere consists of.
#pragma once

#include <cstddef>
#include <string_view>

namespace poseidon {

/// The number of bytes of the UTF-8 sequence at the beginning of `text`, or 0 if there is none. `text` is not empty.
std::size_t utf8_sequence_bytes(std::string_view text);
/// Whether `text` is UTF-8 without control characters, so that a terminal or a log can show it.
bool is_printable(std::string_view text);

}  // namespace poseidon
