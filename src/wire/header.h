// The 64 bytes that come before every payload (docs/wire-format.md).
//
// The Envelope says what a transport and a router need. What else a kind says is in a struct of wire/messages/.
//
// To send:     wire::Envelope about;                         // rank, unit, chunk, step, priority
//              flow.send(wire::Pull{.array = 1}.make(about), {}, done);
// To receive:  check_kind(header.kind, direction, header.payload_bytes), once for each message; then
//              const auto pull = wire::Pull::read(header);
//
// The read() of a struct that lies in the header cannot fail and costs a few loads: decode() has checked dtype, flags
// and unused bytes. The read() of a payload returns a Result where not every payload has a meaning.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/coding.h"
#include "poseidon/dtype.h"
#include "poseidon/status.h"
#include "wire/kinds.h"

namespace poseidon::wire {

inline constexpr std::uint32_t kMagic = 0x31445350;  // "PSD1" in little-endian bytes
inline constexpr std::uint8_t kVersion = 5;
inline constexpr std::size_t kHeaderBytes = 64;
inline constexpr std::size_t kBodyBytes = 28;
/// Header::priority: a sender lets messages of a lower level overtake those of a higher one.
inline constexpr std::uint16_t kPriorityLevels = 1024;
inline constexpr std::uint16_t kFirstPriority = 0;                   // for messages that end or begin a connection
inline constexpr std::uint16_t kLastPriority = kPriorityLevels - 1;  // for a goodbye, which is the last message

/// The fields that all kinds of messages share, as far as they use them. Transports and routers need them.
struct Envelope {
  Kind kind = Kind::hello;
  std::uint16_t priority = kFirstPriority;
  std::uint32_t rank = 0;   // the worker that sent the message; in a message from a server, the worker that gets it
  std::uint32_t unit = 0;   // what is exchanged: a layer, or a group of small layers; ids are the plan's
  std::uint32_t chunk = 0;  // the slice of the unit
  std::uint64_t step = 0;   // of the unit: the number of the worker's contributions so far, from 1
  std::uint64_t payload_bytes = 0;  // as the values are in memory
  // Only a transport sets these two (transport/coded_payload.h):
  Coding coding = Coding::none;  // as what the payload travels
  bool prefers_plain = false;    // the sender has no time to decode what it receives

  bool operator==(const Envelope&) const = default;
};

/// A message without its payload. `body` belongs to the kind. Only the structs of wire/messages/ read or write it.
struct Header : Envelope {
  std::array<std::byte, kBodyBytes> body{};

  bool operator==(const Header&) const = default;
};

/// As what values of a type are coded, without loss whatever they are. Coding::none: not at all.
Coding coding_of(DType dtype);
/// What a payload of the kind, with values of the type that the body names, can be coded as. Coding::none: as nothing,
/// because it has other values, or parts of values.
Coding coding_of(const Header& header);

void encode(const Header& header, std::span<std::byte, kHeaderBytes> out);

/// ErrorCode::mismatch: a wrong magic number, version, kind or priority; an oversized payload; or a body with a dtype,
/// a flag or a byte that the kind does not have. The text names the field, and `header` stays as it was. It never reads
/// past `in`.
Status decode(std::span<const std::byte, kHeaderBytes> in, Header& header);

}  // namespace poseidon::wire
