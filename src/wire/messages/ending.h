// The messages that refuse a request, end a connection, or tell that it has not ended: refuse, abort, goodbye,
// heartbeat.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "poseidon/status.h"
#include "wire/messages/text_message.h"

namespace poseidon::wire {

/// refuse: a request of this worker does not fit; the other workers go on. The header has the rank, unit, chunk and
/// step of the request. The payload says why.
struct Refuse {
  Status status;
  std::optional<std::uint32_t> departed_rank;  // status peer_lost: the rank that has left, without which no step ends

  /// An unknown error code is read as ErrorCode::aborted.
  static Refuse read(const Header& header, std::span<const std::byte> payload);
  TextMessage make(const Envelope& request) const;
};

/// abort: the sender has failed, and so has the job's generation. The payload says why.
struct Abort {
  Status status;
  bool planned = false;  // nothing has failed: the job only forms its next generation

  static Abort read(const Header& header, std::span<const std::byte> payload);
  TextMessage make() const;
};

/// goodbye: the sender closes on purpose. It is the last message of its connection and has no payload.
struct Goodbye {
  static Header make();
};

}  // namespace poseidon::wire
