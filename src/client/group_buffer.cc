#include "client/group_buffer.h"

#include <algorithm>
#include <cstring>

namespace poseidon {

namespace {

/// The bytes of 1 in a floating dtype (groups are never integers).
void write_one(DType dtype, std::span<std::byte> out) {
  const float one = 1.0F;
  const double one_double = 1.0;
  const std::uint16_t one_half = 0x3C00;
  const std::uint16_t one_bfloat = 0x3F80;
  const void* source = &one;
  if (dtype == DType::float64) source = &one_double;
  if (dtype == DType::float16) source = &one_half;
  if (dtype == DType::bfloat16) source = &one_bfloat;
  std::memcpy(out.data(), source, out.size());
}

}  // namespace

GroupBuffer::GroupBuffer(const Unit& unit) : unit_(unit), buffer_(unit.size_bytes) {
  std::memset(buffer_.data(), 0, buffer_.size());
}

std::span<std::byte> GroupBuffer::footer(std::size_t member) {
  const std::size_t element_bytes = dtype_bytes(unit_.dtype);
  const std::size_t begin = unit_.size_bytes - unit_.layers.size() * element_bytes;
  return buffer_.span().subspan(begin + member * element_bytes, element_bytes);
}

bool GroupBuffer::put(std::size_t member, std::span<const std::byte> data, bool absent, std::uint32_t divisor) {
  divisor_ = divisor;
  std::byte* place = buffer_.data() + unit_.offsets_bytes[member];
  if (absent) {
    std::memset(place, 0, data.size());
    std::memset(footer(member).data(), 0, footer(member).size());
  } else {
    if (!data.empty()) std::memcpy(place, data.data(), data.size());
    write_one(unit_.dtype, footer(member));
  }
  return ++put_count_ == unit_.layers.size();
}

bool GroupBuffer::present(std::size_t member) {
  const auto bytes = footer(member);
  return std::any_of(bytes.begin(), bytes.end(), [](std::byte b) { return b != std::byte{0}; });
}

void GroupBuffer::take(std::size_t member, std::span<std::byte> data) const {
  if (!data.empty()) std::memcpy(data.data(), buffer_.data() + unit_.offsets_bytes[member], data.size());
}

}  // namespace poseidon
