// The few messages that are more than a header: hello and the texts of refuse and abort.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "poseidon/status.h"
#include "wire/header.h"

namespace poseidon::wire {

/// Longest job name and error text; anything longer is cut when sent and refused when received.
inline constexpr std::size_t kMaxTextBytes = 4096;

/// Who a connection is from.
struct Hello {
  std::uint32_t rank = 0;
  std::uint32_t worker_count = 0;
  std::string job;
};

/// A message whose payload is a text that it owns.
struct TextMessage {
  Header header;
  std::shared_ptr<const std::string> text;
  std::span<const std::byte> payload() const { return std::as_bytes(std::span(*text)); }
};

TextMessage make_hello(const Hello& hello);
/// `kind` is refuse or abort; `about` gives the unit, chunk and step it is about.
TextMessage make_error(Kind kind, const Header& about, const Status& status);

Hello read_hello(const Header& header, std::span<const std::byte> payload);
Status read_error(const Header& header, std::span<const std::byte> payload);

}  // namespace poseidon::wire
