// Numbers one after the other, as lists of stored units and the heads of checkpoints have them: little-endian integers
// as they are in memory.
#pragma once

#include <bit>
#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>

namespace poseidon::wire {

static_assert(std::endian::native == std::endian::little, "files and messages hold integers as they are");

template <typename... Numbers>
void append_numbers(std::string& bytes, const Numbers&... numbers) {
  static_assert((std::is_integral_v<Numbers> && ...));
  (bytes.append(reinterpret_cast<const char*>(&numbers), sizeof numbers), ...);
}

/// Reads fields one after the other. Past the end every field is zero or empty, and `ok()` returns false.
class Cursor {
 public:
  explicit Cursor(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <typename... Numbers>
  void numbers(Numbers&... into) {
    static_assert((std::is_integral_v<Numbers> && ...));
    ((into = number<Numbers>()), ...);
  }
  template <typename T>
  T number() {
    T value{};
    if (const auto piece = bytes(sizeof value); !piece.empty()) std::memcpy(&value, piece.data(), sizeof value);
    return value;
  }
  std::string text(std::size_t size_bytes) {
    const auto piece = bytes(size_bytes);
    return {reinterpret_cast<const char*>(piece.data()), piece.size()};
  }
  std::span<const std::byte> bytes(std::size_t size_bytes) {
    ok_ = ok_ && size_bytes <= bytes_.size();
    if (!ok_) return {};
    const auto piece = bytes_.first(size_bytes);
    bytes_ = bytes_.subspan(size_bytes);
    return piece;
  }
  bool ok() const { return ok_; }
  std::size_t left_bytes() const { return bytes_.size(); }

 private:
  std::span<const std::byte> bytes_;
  bool ok_ = true;
};

}  // namespace poseidon::wire
