#include "wire/messages/units.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "wire/body.h"

namespace poseidon::wire {

namespace {

// run, base version; then for each unit: id, dtype in four bytes, size, chunk size, length of the name, name.
constexpr std::size_t kStartBytes = 16;
constexpr std::size_t kUnitBytes = 28;

template <typename T>
void append(std::string& bytes, T value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

template <typename T>
T take(std::span<const std::byte>& bytes) {
  T value;
  std::memcpy(&value, bytes.data(), sizeof value);
  bytes = bytes.subspan(sizeof value);
  return value;
}

std::string start_of(const StoredUnits& units) {
  std::string bytes;
  append(bytes, units.run);
  append(bytes, units.base_version);
  return bytes;
}

TextMessage message_of(std::string bytes, std::uint32_t rank) {
  Header header;
  header.kind = Kind::units;
  header.rank = rank;
  return with_text(header, std::move(bytes));
}

Status bad(const std::string& why) { return {ErrorCode::mismatch, "a list of stored units " + why}; }

}  // namespace

constinit const BodyShape BodyShapes::units{};

Status check_unit(const StoredUnit& unit) {
  const std::size_t element_bytes = dtype_bytes(unit.dtype);
  if (element_bytes == 0) return bad("with an unknown dtype");
  if (unit.name.empty() || unit.name.size() > kMaxUnitNameBytes) return bad("with a name that is empty or too long");
  if (unit.size_bytes == 0 || unit.size_bytes % element_bytes != 0)
    return bad("with " + std::to_string(unit.size_bytes) + " bytes of " + std::string(dtype_name(unit.dtype)));
  if (unit.chunk_bytes == 0 || unit.chunk_bytes > unit.size_bytes || unit.chunk_bytes % element_bytes != 0 ||
      (unit.size_bytes - 1) / unit.chunk_bytes >= UINT32_MAX)
    return bad("with chunks of " + std::to_string(unit.chunk_bytes) + " bytes");
  return {};
}

std::vector<TextMessage> StoredUnits::make(std::uint32_t rank) const {
  std::vector<TextMessage> messages;
  std::string bytes = start_of(*this);
  for (const StoredUnit& unit : units) {
    const std::size_t name_bytes = std::min(unit.name.size(), kMaxUnitNameBytes);
    if (bytes.size() + kUnitBytes + name_bytes > kMaxTextBytes)
      messages.push_back(message_of(std::exchange(bytes, start_of(*this)), rank));
    append(bytes, unit.id);
    append(bytes, static_cast<std::uint32_t>(unit.dtype));
    append(bytes, unit.size_bytes);
    append(bytes, unit.chunk_bytes);
    append(bytes, static_cast<std::uint32_t>(name_bytes));
    bytes.append(unit.name, 0, name_bytes);
  }
  if (bytes.size() > kStartBytes) messages.push_back(message_of(std::move(bytes), rank));
  return messages;
}

Result<StoredUnits> StoredUnits::read(std::span<const std::byte> payload) {
  if (payload.size() < kStartBytes) return bad("of " + std::to_string(payload.size()) + " bytes");
  StoredUnits units;
  units.run = take<std::uint64_t>(payload);
  units.base_version = take<std::uint64_t>(payload);
  while (!payload.empty()) {
    if (payload.size() < kUnitBytes) return bad("that ends too early");
    StoredUnit unit;
    unit.id = take<std::uint32_t>(payload);
    const auto dtype = take<std::uint32_t>(payload);
    unit.dtype = dtype <= UINT8_MAX ? static_cast<DType>(dtype) : DType{};
    unit.size_bytes = take<std::uint64_t>(payload);
    unit.chunk_bytes = take<std::uint64_t>(payload);
    const auto name_bytes = take<std::uint32_t>(payload);
    if (name_bytes > payload.size()) return bad("that ends too early");
    unit.name.assign(reinterpret_cast<const char*>(payload.data()), name_bytes);
    payload = payload.subspan(name_bytes);
    if (Status status = check_unit(unit); !status.ok()) return status;
    units.units.push_back(std::move(unit));
  }
  return units;
}

}  // namespace poseidon::wire
