// The messages of collectives, and of ranks that send each other something (poseidon/collective.h).
//
// The envelope's unit is the number of the communicator, and its step that of the call: the collectives of the
// communicator so far, or what the sender has sent to this receiver so far.
#pragma once

#include <cstdint>

#include "poseidon/dtype.h"
#include "wire/header.h"

namespace poseidon::wire {

/// piece: a part or the result of a chunk of a collective (the envelope's chunk), or a piece of what one rank sends to
/// another one. Payload: its values. A sent message of which this is the first piece may have none: it says what comes.
struct Piece {
  DType dtype = DType::uint8;      // of the values, as far as coding is concerned
  bool is_result = false;          // of the chunk; false: a part of it
  bool is_sent = false;            // by send, to the rank that calls recv
  std::uint64_t total_bytes = 0;   // is_sent: of the message
  std::uint64_t offset_bytes = 0;  // is_sent: of this piece in it
  std::uint32_t tag = 0;           // is_sent
  std::uint32_t signature = 0;     // of the collective: ranks that make the same call have the same

  static Piece read(const Header& header);
  Header make(const Envelope& about) const;

  bool operator==(const Piece&) const = default;
};

/// ready: the sender of this has begun the call, and takes all that the receiver has for it. No payload.
struct Ready {
  bool is_sent = false;           // the call is a send of the receiver
  std::uint64_t takes_bytes = 0;  // of a collective: what the sender of this awaits from the receiver
  std::uint64_t gives_bytes = 0;  // of a collective: what it has for the receiver
  std::uint32_t signature = 0;    // of the collective

  static Ready read(const Header& header);
  Header make(const Envelope& about) const;

  bool operator==(const Ready&) const = default;
};

}  // namespace poseidon::wire
