#include "client/group.h"

#include <algorithm>
#include <cstring>

#include "base/invariant.h"

namespace poseidon {

namespace {

/// Writes 1 in a floating-point dtype. Groups never have integer dtypes.
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

Group::Group(const Unit& unit)
    : unit_(unit), footer_(unit.layers.size() * dtype_bytes(unit.dtype)), pieces_(unit.layers.size() + 1) {
  std::memset(footer_.data(), 0, footer_.size());
  pieces_.back() = footer_.span();
}

bool Group::put(std::size_t member, std::span<const std::byte> data, bool absent, std::uint32_t divisor) {
  invariant(member < unit_.layers.size() && put_count_ < unit_.layers.size(),
            "each member joins its group once a step");
  divisor_ = divisor;
  const std::size_t element_bytes = dtype_bytes(unit_.dtype);
  const auto mark = footer_.span().subspan(member * element_bytes, element_bytes);
  absent_count_ += absent ? 1 : 0;
  if (absent) {
    if (!zeros_) {
      zeros_ = Buffer(footer_begin());
      std::memset(zeros_.data(), 0, zeros_.size());
    }
    pieces_[member] = std::span<const std::byte>(zeros_.span()).first(data.size());
    std::memset(mark.data(), 0, mark.size());
  } else {
    pieces_[member] = data;
    write_one(unit_.dtype, mark);
  }
  return ++put_count_ == unit_.layers.size();
}

bool Group::present(std::span<const std::byte> result, std::size_t member) const {
  invariant(result.size() == unit_.size_bytes && member < unit_.layers.size(), "a group's result has its unit's size");
  const std::size_t element_bytes = dtype_bytes(unit_.dtype);
  const auto mark = result.subspan(footer_begin() + member * element_bytes, element_bytes);
  return std::any_of(mark.begin(), mark.end(), [](std::byte b) { return b != std::byte{0}; });
}

void Group::take(std::span<const std::byte> result, std::size_t member, std::span<std::byte> data) const {
  invariant(unit_.offsets_bytes[member] + data.size() <= result.size(), "a member lies within its group");
  if (!data.empty()) std::memcpy(data.data(), result.data() + unit_.offsets_bytes[member], data.size());
}

}  // namespace poseidon
