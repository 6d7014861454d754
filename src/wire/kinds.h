// The kinds of messages, and one table of what holds for each: who may send it to whom, and what its payload is.
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

/// Between whom a message travels. A set of them is the sum of its bits.
enum Direction : std::uint8_t { kToServer = 1, kToWorker = 2, kToPeer = 4, kAnyDirection = 7 };

/// What a receiver has to do with a payload.
enum class Payload : std::uint8_t {
  none,  // the message is its header alone
  text,  // at most kMaxTextBytes, which the receiver takes into memory of its own
  data,  // an array, which goes where the receiver keeps arrays
};

struct KindInfo {
  const char* name;         // in messages and records, e.g. "push"
  std::uint8_t directions;  // of Direction
  Payload payload;
};

/// By the number of the kind. A new message is a value of Kind, its row here, and its struct in wire/messages/.
inline constexpr std::array<KindInfo, static_cast<std::size_t>(kLastKind) + 1> kKinds{{
    {"none", 0, Payload::none},                       // 0 is no kind
    {"hello", kAnyDirection, Payload::text},          // first on every connection, both ways: who the sender is
    {"push", kToServer, Payload::data},               // a chunk's gradient
    {"result", kToWorker, Payload::data},             // what the step has made of a chunk
    {"factors", kToServer | kToPeer, Payload::data},  // the factors of a layer's gradient
    {"refuse", kToWorker, Payload::text},             // why this worker's request does not fit; the others go on
    {"abort", kAnyDirection, Payload::text},          // why the sender has failed
    {"goodbye", kAnyDirection, Payload::none},        // the sender closes on purpose
    {"rule", kToServer, Payload::text},               // how a unit's parameters are updated from this step on
    {"assign", kToServer, Payload::data},             // sets a chunk's value or a state array of its rule
    {"pull", kToServer, Payload::none},               // asks for a chunk's value or a state array
    {"value", kToWorker, Payload::data},              // answers a pull or a restore
    {"units", kToServer, Payload::text},              // describes the units whose values the servers keep
    {"restore", kToServer, Payload::none},            // asks for what the newest checkpoint has for a chunk
}};

/// `kind` has been decoded or is a value of Kind.
constexpr const KindInfo& info_of(Kind kind) { return kKinds[static_cast<std::size_t>(kind)]; }
constexpr const char* kind_name(Kind kind) { return info_of(kind).name; }
constexpr bool has_text(Kind kind) { return info_of(kind).payload == Payload::text; }

/// The most bytes that a payload of this kind may have.
constexpr std::uint64_t largest_payload(Kind kind) {
  const Payload payload = info_of(kind).payload;
  return payload == Payload::none ? 0 : payload == Payload::text ? kMaxTextBytes : kMaxPayloadBytes;
}

/// ErrorCode::mismatch for a kind that does not travel in this direction, and for a payload that is too large for its
/// kind. What a receiver asks first of every message.
Status check_kind(Kind kind, Direction direction, std::uint64_t payload_bytes);

}  // namespace poseidon::wire
