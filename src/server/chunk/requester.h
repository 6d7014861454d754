// Requester: where a contribution came from and where its result goes.
#pragma once

#include <memory>

#include "base/buffer.h"
#include "poseidon/status.h"
#include "wire/header.h"

namespace poseidon {

/// The connection to one worker, as a shard sees it. Only the loop thread of that shard uses it (those that derive from
/// it check it).
class Requester {
 public:
  virtual ~Requester() = default;

  /// Sends a message. Its payload (null: none) stays alive and unchanged until the message has left.
  virtual void send(const wire::Header& header, std::shared_ptr<const Buffer> payload) = 0;
  /// Whether a payload of so many bytes of values would travel coded now.
  virtual bool codes(std::size_t /*payload_bytes*/) const { return false; }
  /// Tells this worker, and nobody else, that one of its requests does not fit.
  virtual void refuse(const wire::Envelope& about, const Status& status) = 0;
};

}  // namespace poseidon
