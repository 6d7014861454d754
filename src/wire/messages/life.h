// heartbeat and waiting: what the others know of a process without waiting for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "wire/header.h"
#include "wire/messages/text_message.h"

namespace poseidon::wire {

/// heartbeat: the sender's process runs. It overtakes data, is no progress of a step, and has no payload. A server
/// answers with another one, after what it has sent before.
struct Heartbeat {
  std::uint32_t level = 0;  // see client/standstill.h; 0: the sender does not stand

  static Heartbeat read(const Header& header);
  Header make() const;

  bool operator==(const Heartbeat&) const = default;
};

/// waiting: what the sender has waited for since a while. The payload is a text for people.
struct Waiting {
  std::string text;

  static Waiting read(std::span<const std::byte> payload);
  TextMessage make() const;
};

}  // namespace poseidon::wire
