#include "wire/header.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

namespace poseidon::wire {

static_assert(std::endian::native == std::endian::little, "the codec copies little-endian integers as they are");

namespace {

// Byte offsets of the fields (docs/wire-format.md).
enum Offset : std::size_t {
  kMagicAt = 0,
  kVersionAt = 4,
  kKindAt = 5,
  kDTypeAt = 6,
  kFlagsAt = 7,
  kRankAt = 8,
  kWorkerCountAt = 12,
  kUnitAt = 16,
  kChunkAt = 20,
  kStepAt = 24,
  kDivisorAt = 32,
  kFactorCountAt = 36,
  kRowsAt = 40,
  kColsAt = 44,
  kPayloadBytesAt = 48,
  kPriorityAt = 56,
  kReservedAt = 58,
};

constexpr std::uint8_t kKnownFlags = kAbsent | kDense | kTransient | kStored | kNoResult | kLate;

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

std::optional<std::uint64_t> limited_product(std::uint64_t a, std::uint64_t b, std::uint64_t c) {
  std::uint64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product) || __builtin_mul_overflow(product, c, &product) ||
      product > kMaxPayloadBytes)
    return std::nullopt;
  return product;
}

Status bad(const std::string& what) { return {ErrorCode::mismatch, "not a Poseidon message: " + what}; }

}  // namespace

std::optional<std::uint64_t> factor_bytes(const Header& header) {
  return limited_product(header.factor_count, std::uint64_t{header.rows} + header.cols, dtype_bytes(header.dtype));
}

std::optional<std::uint64_t> matrix_bytes(const Header& header) {
  return limited_product(header.rows, header.cols, dtype_bytes(header.dtype));
}

void encode(const Header& header, std::span<std::byte, kHeaderBytes> out) {
  put(out, kMagicAt, kMagic);
  put(out, kVersionAt, kVersion);
  put(out, kKindAt, static_cast<std::uint8_t>(header.kind));
  put(out, kDTypeAt, static_cast<std::uint8_t>(header.dtype));
  put(out, kFlagsAt, header.flags);
  put(out, kRankAt, header.rank);
  put(out, kWorkerCountAt, header.worker_count);
  put(out, kUnitAt, header.unit);
  put(out, kChunkAt, header.chunk);
  put(out, kStepAt, header.step);
  put(out, kDivisorAt, header.divisor);
  put(out, kFactorCountAt, header.factor_count);
  put(out, kRowsAt, header.rows);
  put(out, kColsAt, header.cols);
  put(out, kPayloadBytesAt, header.payload_bytes);
  put(out, kPriorityAt, header.priority);
  std::memset(out.data() + kReservedAt, 0, kHeaderBytes - kReservedAt);
}

Result<Header> decode(std::span<const std::byte, kHeaderBytes> in) {
  if (take<std::uint32_t>(in, kMagicAt) != kMagic) return bad("wrong magic number");
  if (const auto version = take<std::uint8_t>(in, kVersionAt); version != kVersion)
    return bad("wire format version " + std::to_string(version) + ", this side speaks " + std::to_string(kVersion) +
               "; install the same poseidon-dl on every machine");
  const auto kind = take<std::uint8_t>(in, kKindAt);
  if (kind < static_cast<std::uint8_t>(Kind::hello) || kind > static_cast<std::uint8_t>(kLastKind))
    return bad("unknown kind " + std::to_string(kind));
  const auto dtype = static_cast<DType>(take<std::uint8_t>(in, kDTypeAt));
  if (dtype_bytes(dtype) == 0) return bad("unknown dtype");
  Header header;
  header.kind = static_cast<Kind>(kind);
  header.dtype = dtype;
  header.flags = take<std::uint8_t>(in, kFlagsAt);
  if ((header.flags & ~kKnownFlags) != 0) return bad("unknown flags");
  header.rank = take<std::uint32_t>(in, kRankAt);
  header.worker_count = take<std::uint32_t>(in, kWorkerCountAt);
  header.unit = take<std::uint32_t>(in, kUnitAt);
  header.chunk = take<std::uint32_t>(in, kChunkAt);
  header.step = take<std::uint64_t>(in, kStepAt);
  header.divisor = take<std::uint32_t>(in, kDivisorAt);
  header.factor_count = take<std::uint32_t>(in, kFactorCountAt);
  header.rows = take<std::uint32_t>(in, kRowsAt);
  header.cols = take<std::uint32_t>(in, kColsAt);
  header.payload_bytes = take<std::uint64_t>(in, kPayloadBytesAt);
  if (header.payload_bytes > kMaxPayloadBytes)
    return bad("payload of " + std::to_string(header.payload_bytes) + " bytes is over the limit");
  header.priority = take<std::uint16_t>(in, kPriorityAt);
  if (header.priority >= kPriorityLevels) return bad("priority " + std::to_string(header.priority));
  const auto reserved = in.subspan(kReservedAt);
  if (std::any_of(reserved.begin(), reserved.end(), [](std::byte b) { return b != std::byte{0}; }))
    return bad("reserved bytes are not zero");
  return header;
}

}  // namespace poseidon::wire
