// Addressee: what takes the messages of one exchange, once a receiver has found out whose they are.
#pragma once

#include <cstddef>
#include <span>

#include "poseidon/status.h"
#include "wire/header.h"

namespace poseidon {

/// Called on the flow's loop, like Receiver.
class Addressee {
 public:
  /// A message's header is here. Returns the memory for its payload; if `lent`, the payload comes with on_message(),
  /// and nothing is returned. After an error on_message() is not called.
  virtual Result<std::span<std::byte>> accept(const wire::Header& header, bool lent) = 0;
  /// The message is complete. `payload` is the memory that accept() returned, or it is lent during the call.
  virtual Status on_message(const wire::Header& header, std::span<const std::byte> payload) = 0;

 protected:
  ~Addressee() = default;
};

}  // namespace poseidon
