#include "wire/messages/text_message.h"

#include <algorithm>
#include <utility>

namespace poseidon::wire {

TextMessage with_text(Header header, std::string text) {
  text.resize(std::min(text.size(), kMaxTextBytes));
  header.payload_bytes = text.size();
  return {header, std::make_shared<const std::string>(std::move(text))};
}

std::string as_text(std::span<const std::byte> payload) {
  return {reinterpret_cast<const char*>(payload.data()), payload.size()};
}

}  // namespace poseidon::wire
