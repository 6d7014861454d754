// The kinds of messages: what kinds.def says of each.
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

/// The number of a kind on the wire is the place of its row in kinds.def, from 1.
enum class Kind : std::uint8_t {
  none,  // no kind
#define POSEIDON_KIND(name, ...) name,
#include "wire/kinds.def"
};

/// Between which processes a message travels.
enum class Direction : std::uint8_t { to_server, from_server, from_peer };

/// What a receiver does with a payload.
enum class Payload : std::uint8_t { none, text, data };

/// What a receiver does with a message (kinds.def).
enum class Handling : std::uint8_t { never, handled, request, exchanged };

struct KindInfo {
  const char* name;  // in messages and records, e.g. "push"
  Payload payload;
  std::array<Handling, 3> handling;  // by Direction
};

/// By the number of the kind.
inline constexpr std::array kKinds{
    KindInfo{"none", Payload::none, {}},
#define POSEIDON_KIND(name, payload, at_server, from_server, from_peer) \
  KindInfo{#name, Payload::payload, {Handling::at_server, Handling::from_server, Handling::from_peer}},
#include "wire/kinds.def"
};

/// `kind` must have been decoded, or be a value of Kind.
constexpr const KindInfo& info_of(Kind kind) { return kKinds[static_cast<std::size_t>(kind)]; }
constexpr const char* kind_name(Kind kind) { return info_of(kind).name; }
constexpr bool has_text(Kind kind) { return info_of(kind).payload == Payload::text; }
/// What the receiver of this direction does with a message of this kind.
constexpr Handling handling_of(Kind kind, Direction direction) {
  return info_of(kind).handling[static_cast<std::size_t>(direction)];
}
/// Whether that is done by the handler of the kind.
constexpr bool has_handler(Kind kind, Direction direction) {
  const Handling handling = handling_of(kind, direction);
  return handling == Handling::handled || handling == Handling::request;
}

/// The most bytes that a payload of this kind may have.
constexpr std::uint64_t largest_payload(Kind kind) {
  const Payload payload = info_of(kind).payload;
  return payload == Payload::none ? 0 : payload == Payload::text ? kMaxTextBytes : kMaxPayloadBytes;
}

/// The first check of every received message. ErrorCode::mismatch: the kind is not sent in this direction, or the
/// payload is too large for its kind.
Status check_kind(Kind kind, Direction direction, std::uint64_t payload_bytes);

}  // namespace poseidon::wire
