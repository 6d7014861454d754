#include "wire/header.h"

#include <bit>
#include <cstring>
#include <string>

#include "poseidon/plan.h"
#include "wire/body.h"
#include "wire/messages/contribution.h"

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
  kCodingAt = 15,  // the highest byte of the field
  kStepAt = 16,
  kRankAt = 24,
  kUnitAt = 28,
  kChunkAt = 32,
  kBodyAt = 36,
};
static_assert(kBodyAt + kBodyBytes == kHeaderBytes);
static_assert(kHeaderBytes == kMessageHeaderBytes);

template <typename T>
void put(std::span<std::byte, kHeaderBytes> out, std::size_t at, T value) {
  std::memcpy(out.data() + at, &value, sizeof value);
}

template <typename T>
T take(std::span<const std::byte> in, std::size_t at) {
  T value{};
  std::memcpy(&value, in.data() + at, sizeof value);
  return value;
}

// The coding's byte has the sender's preference, too.
constexpr std::uint8_t kPrefersPlain = 0x80;
constexpr auto kLastCodingByte = static_cast<std::uint8_t>(kLastCoding);
static_assert(kMaxPayloadBytes >> (8 * (kCodingAt - kPayloadBytesAt)) == 0);

std::uint64_t payload_bytes_in(std::span<const std::byte> in) {
  return take<std::uint64_t>(in, kPayloadBytesAt) & ~(std::uint64_t{0xff} << (8 * (kCodingAt - kPayloadBytesAt)));
}

Status bad(const std::string& what) { return {ErrorCode::mismatch, "not a Poseidon message: " + what}; }

constexpr std::array kShapes{
    static_cast<const BodyShape*>(nullptr),  // of no kind
#define POSEIDON_KIND(name, ...) &BodyShapes::name,
#include "wire/kinds.def"
};

/// Whether the body has nothing but what its kind may have.
bool has_shape(std::span<const std::byte> body, const BodyShape& shape) {
  const auto may_have = std::as_bytes(std::span(shape.may_have));
  std::uint64_t excess = take<std::uint32_t>(body, kBodyBytes - 4) & ~take<std::uint32_t>(may_have, kBodyBytes - 4);
  for (std::size_t at = 0; at + 8 <= kBodyBytes; at += 8)
    excess |= take<std::uint64_t>(body, at) & ~take<std::uint64_t>(may_have, at);
  return excess == 0 && (!shape.has_dtype || dtype_bytes(static_cast<DType>(body[kDTypeAt])) != 0);
}

bool is_valid(std::span<const std::byte, kHeaderBytes> in) {
  const auto kind = take<std::uint8_t>(in, kKindAt);
  return take<std::uint32_t>(in, kMagicAt) == kMagic && take<std::uint8_t>(in, kVersionAt) == kVersion && kind != 0 &&
         kind < kKinds.size() && take<std::uint16_t>(in, kPriorityAt) < kPriorityLevels &&
         payload_bytes_in(in) <= kMaxPayloadBytes &&
         (take<std::uint8_t>(in, kCodingAt) & ~kPrefersPlain) <= kLastCodingByte &&
         has_shape(in.last<kBodyBytes>(), shape_of(static_cast<Kind>(kind)));
}

/// Says why a header is not valid.
[[gnu::cold]] Status error_of(std::span<const std::byte, kHeaderBytes> in) {
  if (take<std::uint32_t>(in, kMagicAt) != kMagic) return bad("wrong magic number");
  if (const auto version = take<std::uint8_t>(in, kVersionAt); version != kVersion)
    return bad(concat("wire format version ", version, ", this process uses ", kVersion,
                      "; install the same poseidon-dl on every machine"));
  const auto kind = take<std::uint8_t>(in, kKindAt);
  if (kind == 0 || kind >= kKinds.size()) return bad(concat("unknown kind ", kind));
  if (const auto priority = take<std::uint16_t>(in, kPriorityAt); priority >= kPriorityLevels)
    return bad(concat("priority ", priority));
  if (const auto payload_bytes = payload_bytes_in(in); payload_bytes > kMaxPayloadBytes)
    return bad(concat("payload of ", payload_bytes, " bytes is over the limit"));
  if (const int coding = take<std::uint8_t>(in, kCodingAt) & ~kPrefersPlain; coding > kLastCodingByte)
    return bad(concat("unknown coding ", coding));
  const BodyShape& shape = shape_of(static_cast<Kind>(kind));
  const auto body = in.last<kBodyBytes>();
  const auto dtype = static_cast<DType>(body[kDTypeAt]);
  if (shape.has_dtype ? dtype_bytes(dtype) == 0 : body[kDTypeAt] != std::byte{0}) return bad("unknown dtype");
  if ((std::to_integer<unsigned>(body[kFlagsAt]) & ~unsigned{shape.may_have[kFlagsAt]}) != 0)
    return bad("unknown flags");
  return bad("reserved bytes are not zero");
}

}  // namespace

const BodyShape& shape_of(Kind kind) { return *kShapes[static_cast<std::size_t>(kind)]; }

Coding coding_of(DType dtype) {
  switch (dtype) {
    case DType::float32:
      return Coding::float32;
    case DType::float16:
      return Coding::float16;
    case DType::bfloat16:
      return Coding::bfloat16;
    case DType::uint8:  // state of models and optimizers as bytes: most of it is float32
      return Coding::float32;
    case DType::int8_blocks:
      return Coding::int8;
    default:
      return Coding::none;
  }
}

Coding coding_of(const Header& header) {
  if (!shape_of(header.kind).has_dtype || header.payload_bytes == 0) return Coding::none;
  Coding coding = coding_of(static_cast<DType>(header.body[kDTypeAt]));
  if (header.kind == Kind::result && StepResult::read(header).difference) coding = difference_of(coding);
  return header.payload_bytes % value_bytes(coding) == 0 ? coding : Coding::none;
}

void encode(const Header& header, std::span<std::byte, kHeaderBytes> out) {
  put(out, kMagicAt, kMagic);
  put(out, kVersionAt, kVersion);
  put(out, kKindAt, static_cast<std::uint8_t>(header.kind));
  put(out, kPriorityAt, header.priority);
  put(out, kPayloadBytesAt, header.payload_bytes);
  put(out, kCodingAt,
      static_cast<std::uint8_t>(static_cast<std::uint8_t>(header.coding) | (header.prefers_plain ? kPrefersPlain : 0)));
  put(out, kStepAt, header.step);
  put(out, kRankAt, header.rank);
  put(out, kUnitAt, header.unit);
  put(out, kChunkAt, header.chunk);
  put(out, kBodyAt, header.body);
}

Status decode(std::span<const std::byte, kHeaderBytes> in, Header& header) {
  if (!is_valid(in)) return error_of(in);
  header.kind = static_cast<Kind>(take<std::uint8_t>(in, kKindAt));
  header.priority = take<std::uint16_t>(in, kPriorityAt);
  header.payload_bytes = payload_bytes_in(in);
  const auto coding = take<std::uint8_t>(in, kCodingAt);
  header.coding = static_cast<Coding>(coding & ~kPrefersPlain);
  header.prefers_plain = (coding & kPrefersPlain) != 0;
  header.step = take<std::uint64_t>(in, kStepAt);
  header.rank = take<std::uint32_t>(in, kRankAt);
  header.unit = take<std::uint32_t>(in, kUnitAt);
  header.chunk = take<std::uint32_t>(in, kChunkAt);
  header.body = take<std::array<std::byte, kBodyBytes>>(in, kBodyAt);
  return {};
}

}  // namespace poseidon::wire
