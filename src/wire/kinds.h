// The kinds of messages. One table tells, for each kind, who may send it to whom, and what its payload is.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "poseidon/status.h"

namespace poseidon::wire {

/// No payload may be larger.
inline constexpr std::uint64_t kMaxPayloadBytes = std::uint64_t{1} << 34;
/// The longest text payload. A sender cuts a longer text; a receiver refuses it.
inline constexpr std::size_t kMaxTextBytes = 4096;

enum class Kind : std::uint8_t {
  hello = 1,
  push = 2,
  result = 3,
  factors = 4,
  refuse = 5,
  abort = 6,
  goodbye = 7,
  rule = 8,
  assign = 9,
  pull = 10,
  value = 11,
  units = 12,
  restore = 13,
};
inline constexpr Kind kLastKind = Kind::restore;

/// Between which processes a message is sent. A set of directions is the sum of its bits.
enum Direction : std::uint8_t { kToServer = 1, kToWorker = 2, kToPeer = 4, kAnyDirection = 7 };

/// What a receiver does with a payload.
enum class Payload : std::uint8_t {
  none,  // the message is its header alone
  text,  // at most kMaxTextBytes, which the receiver takes into memory of its own
  data,  // an array, which goes where the receiver keeps arrays
};

struct KindInfo {
  const char* name;         // in messages and records, e.g. "push"
  std::uint8_t directions;  // of Direction
  Payload payload;
  // What the body of the header may have (wire/body.h); everything else in it is zero.
  bool has_dtype;
  bool has_code;
  std::uint8_t flags;         // all bits that the kind knows
  std::uint8_t number_bytes;  // of its numbers
};

/// By the number of the kind. A new message is a value of Kind, its row here, and its struct in wire/messages/.
inline constexpr std::array<KindInfo, static_cast<std::size_t>(kLastKind) + 1> kKinds{{
    {"none", 0, Payload::none, false, false, 0, 0},  // 0 is no kind
    // First on every connection, both ways: who the sender is.
    {"hello", kAnyDirection, Payload::text, false, true, 0, 24},
    // A chunk's gradient.
    {"push", kToServer, Payload::data, true, false, 0x3d, 20},
    // What the step has made of a chunk.
    {"result", kToWorker, Payload::data, true, false, 0x03, 8},
    // The factors of a layer's gradient.
    {"factors", kToServer | kToPeer, Payload::data, true, false, 0x3f, 20},
    // Why this worker's request does not fit; the others go on.
    {"refuse", kToWorker, Payload::text, false, true, 0x01, 4},
    // Why the sender has failed.
    {"abort", kAnyDirection, Payload::text, false, true, 0x01, 0},
    // The sender closes on purpose.
    {"goodbye", kAnyDirection, Payload::none, false, false, 0, 0},
    // How a unit's parameters are updated from this step on.
    {"rule", kToServer, Payload::text, false, false, 0, 0},
    // Sets a chunk's value or a state array of its rule.
    {"assign", kToServer, Payload::data, true, false, 0, 12},
    // Asks for a chunk's value or a state array.
    {"pull", kToServer, Payload::none, false, false, 0, 4},
    // Answers a pull or a restore.
    {"value", kToWorker, Payload::data, true, false, 0x01, 20},
    // Describes the units whose values the servers keep.
    {"units", kToServer, Payload::text, false, false, 0, 0},
    // Asks for what the newest checkpoint has for a chunk.
    {"restore", kToServer, Payload::none, true, false, 0, 8},
}};

/// `kind` must have been decoded, or be a value of Kind.
constexpr const KindInfo& info_of(Kind kind) { return kKinds[static_cast<std::size_t>(kind)]; }
constexpr const char* kind_name(Kind kind) { return info_of(kind).name; }
constexpr bool has_text(Kind kind) { return info_of(kind).payload == Payload::text; }

/// The most bytes that a payload of this kind may have.
constexpr std::uint64_t largest_payload(Kind kind) {
  const Payload payload = info_of(kind).payload;
  return payload == Payload::none ? 0 : payload == Payload::text ? kMaxTextBytes : kMaxPayloadBytes;
}

/// The first check of every received message. ErrorCode::mismatch: the kind is not sent in this direction, or the
/// payload is too large for its kind.
Status check_kind(Kind kind, Direction direction, std::uint64_t payload_bytes);

}  // namespace poseidon::wire
