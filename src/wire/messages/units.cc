#include "wire/messages/units.h"

#include <algorithm>
#include <utility>

#include "wire/body.h"
#include "wire/number_list.h"

namespace poseidon::wire {

namespace {

// run, base version; then for each unit: id, dtype in four bytes, size, chunk size, length of the name, name.
constexpr std::size_t kStartBytes = 16;
constexpr std::size_t kUnitBytes = 28;

std::string start_of(const StoredUnits& units) {
  std::string bytes;
  append_numbers(bytes, units.run, units.base_version);
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
    return bad(concat("with ", unit.size_bytes, " bytes of ", dtype_name(unit.dtype)));
  if (unit.chunk_bytes == 0 || unit.chunk_bytes > unit.size_bytes || unit.chunk_bytes % element_bytes != 0 ||
      (unit.size_bytes - 1) / unit.chunk_bytes >= UINT32_MAX)
    return bad(concat("with chunks of ", unit.chunk_bytes, " bytes"));
  return {};
}

std::vector<TextMessage> StoredUnits::make(std::uint32_t rank) const {
  std::vector<TextMessage> messages;
  std::string bytes = start_of(*this);
  for (const StoredUnit& unit : units) {
    const std::size_t name_bytes = std::min(unit.name.size(), kMaxUnitNameBytes);
    if (bytes.size() + kUnitBytes + name_bytes > kMaxTextBytes)
      messages.push_back(message_of(std::exchange(bytes, start_of(*this)), rank));
    append_numbers(bytes, unit.id, static_cast<std::uint32_t>(unit.dtype), unit.size_bytes, unit.chunk_bytes,
                   static_cast<std::uint32_t>(name_bytes));
    bytes.append(unit.name, 0, name_bytes);
  }
  if (bytes.size() > kStartBytes) messages.push_back(message_of(std::move(bytes), rank));
  return messages;
}

Result<StoredUnits> StoredUnits::read(std::span<const std::byte> payload) {
  if (payload.size() < kStartBytes) return bad(concat("of ", payload.size(), " bytes"));
  StoredUnits units;
  Cursor cursor(payload);
  cursor.numbers(units.run, units.base_version);
  while (cursor.left_bytes() > 0) {
    StoredUnit unit;
    std::uint32_t dtype = 0;
    std::uint32_t name_bytes = 0;
    cursor.numbers(unit.id, dtype, unit.size_bytes, unit.chunk_bytes, name_bytes);
    unit.dtype = dtype <= UINT8_MAX ? static_cast<DType>(dtype) : DType{};
    unit.name = cursor.text(name_bytes);
    if (!cursor.ok()) return bad("that ends too early");
    if (Status status = check_unit(unit); !status.ok()) return status;
    units.units.push_back(std::move(unit));
  }
  return units;
}

}  // namespace poseidon::wire
