#include "wire/header.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "poseidon/dtype.h"
#include "wire/body.h"

namespace poseidon::wire {

static_assert(std::endian::native == std::endian::little, "the codec copies little-endian integers as they are");

namespace {

// Byte offsets of the fields (docs/wire-format.md).
enum Offset : std::size_t {
  kMagicAt = 0,
  kVersionAt = 4,
  kKindAt = 5,
  kPriorityAt = 6,
  kPayloadBytesAt = 8,
  kStepAt = 16,
  kRankAt = 24,
  kUnitAt = 28,
  kChunkAt = 32,
  kBodyAt = 36,
};
static_assert(kBodyAt + kBodyBytes == kHeaderBytes);

template <typename T>
void put(std::span<std::byte, kHeaderBytes> out, std::size_t at, T value) {
  std::memcpy(out.data() + at, &value, sizeof value);
}

template <typename T>
T take(std::span<const std::byte, kHeaderBytes> in, std::size_t at) {
  T value;
  std::memcpy(&value, in.data() + at, sizeof value);
  return value;
}

Status bad(const std::string& what) { return {ErrorCode::mismatch, "not a Poseidon message: " + what}; }

/// Whether the body has nothing but what its kind may have.
Status check_body(const Header& header) {
  const KindInfo& info = info_of(header.kind);
  const auto& body = header.body;
  const auto dtype = static_cast<DType>(body[kDTypeAt]);
  if (info.has_dtype ? dtype_bytes(dtype) == 0 : body[kDTypeAt] != std::byte{0}) return bad("unknown dtype");
  if ((std::to_integer<unsigned>(body[kFlagsAt]) & ~unsigned{info.flags}) != 0) return bad("unknown flags");
  const auto is_zero = [](std::byte byte) { return byte == std::byte{0}; };
  if ((!info.has_code && !is_zero(body[kCodeAt])) || !is_zero(body[kCodeAt + 1]) ||
      !std::all_of(body.begin() + kNumbersAt + info.number_bytes, body.end(), is_zero))
    return bad("reserved bytes are not zero");
  return {};
}

}  // namespace

void encode(const Header& header, std::span<std::byte, kHeaderBytes> out) {
  put(out, kMagicAt, kMagic);
  put(out, kVersionAt, kVersion);
  put(out, kKindAt, static_cast<std::uint8_t>(header.kind));
  put(out, kPriorityAt, header.priority);
  put(out, kPayloadBytesAt, header.payload_bytes);
  put(out, kStepAt, header.step);
  put(out, kRankAt, header.rank);
  put(out, kUnitAt, header.unit);
  put(out, kChunkAt, header.chunk);
  put(out, kBodyAt, header.body);
}

Result<Header> decode(std::span<const std::byte, kHeaderBytes> in) {
  if (take<std::uint32_t>(in, kMagicAt) != kMagic) return bad("wrong magic number");
  if (const auto version = take<std::uint8_t>(in, kVersionAt); version != kVersion)
    return bad("wire format version " + std::to_string(version) + ", this process uses " + std::to_string(kVersion) +
               "; install the same poseidon-dl on every machine");
  const auto kind = take<std::uint8_t>(in, kKindAt);
  if (kind == 0 || kind > static_cast<std::uint8_t>(kLastKind)) return bad("unknown kind " + std::to_string(kind));
  Header header;
  header.kind = static_cast<Kind>(kind);
  header.priority = take<std::uint16_t>(in, kPriorityAt);
  if (header.priority >= kPriorityLevels) return bad("priority " + std::to_string(header.priority));
  header.payload_bytes = take<std::uint64_t>(in, kPayloadBytesAt);
  if (header.payload_bytes > kMaxPayloadBytes)
    return bad("payload of " + std::to_string(header.payload_bytes) + " bytes is over the limit");
  header.step = take<std::uint64_t>(in, kStepAt);
  header.rank = take<std::uint32_t>(in, kRankAt);
  header.unit = take<std::uint32_t>(in, kUnitAt);
  header.chunk = take<std::uint32_t>(in, kChunkAt);
  header.body = take<std::array<std::byte, kBodyBytes>>(in, kBodyAt);
  if (Status status = check_body(header); !status.ok()) return status;
  return header;
}

}  // namespace poseidon::wire
