// A message whose payload is a text, or a few bytes of a form of their own, that the message owns.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "wire/header.h"

namespace poseidon::wire {

struct TextMessage {
  Header header;
  std::shared_ptr<const std::string> text;

  std::span<const std::byte> payload() const { return std::as_bytes(std::span(*text)); }
};

/// `header` with `text` as its payload, which is cut at kMaxTextBytes.
TextMessage with_text(Header header, std::string text);

/// A payload as text.
std::string as_text(std::span<const std::byte> payload);

}  // namespace poseidon::wire
