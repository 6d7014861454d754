// The 64-byte header that stands before every payload (docs/wire-format.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "poseidon/dtype.h"
#include "poseidon/status.h"
#include "wire/kinds.h"

namespace poseidon::wire {

inline constexpr std::uint32_t kMagic = 0x31445350;  // "PSD1" in little-endian bytes
inline constexpr std::uint8_t kVersion = 2;
inline constexpr std::size_t kHeaderBytes = 64;
/// Header::priority: whoever sends lets messages of a lower level overtake those of a higher one.
inline constexpr std::uint16_t kPriorityLevels = 1024;
inline constexpr std::uint16_t kFirstPriority = 0;                   // what ends or begins a connection
inline constexpr std::uint16_t kLastPriority = kPriorityLevels - 1;  // goodbye: nothing comes after it

/// Bits of Header::flags.
enum Flag : std::uint8_t {
  kAbsent = 1,     // nobody has contributed (push, factors: the sender); no payload but that of a stored value
  kDense = 2,      // a factors message whose payload is the dense gradient
  kTransient = 4,  // the server forgets the chunk when all have its result
  kStored = 8,     // the server keeps the chunk's value: a push updates or replaces it, a pull asks for it
  kNoResult = 16,  // a push whose sender does not want the result
  kLate = 64,      // stragglers=drop. result: of a step that ended without this worker; push: it is not to count
};

/// Field by field in wire order; all integers little-endian.
struct Header {
  Kind kind = Kind::hello;
  DType dtype = DType::float32;
  std::uint8_t flags = 0;
  std::uint32_t rank = 0;          // of the worker the message is from (result: is for)
  std::uint32_t worker_count = 0;  // P₁ as the sender knows it
  std::uint32_t unit = 0;
  std::uint32_t chunk = 0;
  std::uint64_t step = 0;
  std::uint32_t divisor = 1;       // refuse, abort: the ErrorCode
  std::uint32_t factor_count = 0;  // K of the sender (result: the sum over the workers); kUnboundedFactors: dense
  std::uint32_t rows = 0;          // factors: M; assign, pull, value: the array, 0 the value, 1… the rule's state;
                                   // late result: how many steps of the chunk have ended since
  std::uint32_t cols = 0;          // factors: N; value: the version of the checkpoint that it was restored from
  std::uint64_t payload_bytes = 0;
  std::uint16_t priority = kFirstPriority;
};

/// The factor count of a contribution that has no factors; sums saturate at it.
inline constexpr std::uint32_t kUnboundedFactors = 0xffffffffu;

/// Bytes of a factors payload and of the matrix that it stands for, as the header's rows, cols,
/// factor_count and dtype say; nullopt where that is more than kMaxPayloadBytes.
std::optional<std::uint64_t> factor_bytes(const Header& header);
std::optional<std::uint64_t> matrix_bytes(const Header& header);

void encode(const Header& header, std::span<std::byte, kHeaderBytes> out);

/// Rejects a wrong magic, version, kind, dtype, unknown flag, non-zero reserved byte or oversized
/// payload with ErrorCode::mismatch and a message that names the field. Never reads past `in`.
Result<Header> decode(std::span<const std::byte, kHeaderBytes> in);

}  // namespace poseidon::wire
