// Requester: where a contribution came from and where its result goes.
#pragma once

#include <memory>

#include "base/buffer.h"
#include "poseidon/status.h"
#include "wire/header.h"

namespace poseidon {

/// One worker's way back, as a shard sees it. Loop thread of that shard.
class Requester {
 public:
  virtual ~Requester() = default;

  /// Sends a message whose payload (null: none) stays alive and unchanged until it has left.
  virtual void send(const wire::Header& header, std::shared_ptr<const Buffer> payload) = 0;
  /// Tells this worker, and nobody else, that a request of its does not fit.
  virtual void refuse(const wire::Envelope& about, const Status& status) = 0;
};

}  // namespace poseidon
