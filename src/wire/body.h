// How the structs of wire/messages/ lie in Header::body. One list of fields serves for reading and for writing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "poseidon/dtype.h"
#include "wire/header.h"

namespace poseidon::wire {

// Every body begins with a dtype, flags, a code and a zero byte. Each of them is zero if the kind does not have it.
// Numbers follow.
inline constexpr std::size_t kDTypeAt = 0;
inline constexpr std::size_t kFlagsAt = 1;
inline constexpr std::size_t kCodeAt = 2;
inline constexpr std::size_t kNumbersAt = 4;

/// Aborts if a message lists more fields than a body holds, which is an error in the program. The offsets are known
/// when it is compiled, so the check costs nothing.
inline void check_room(std::size_t at, std::size_t size_bytes) {
  if (at + size_bytes > kBodyBytes) std::abort();
}

/// A kind names its fields once, in the order of the wire: `[](auto& body, auto& message) { body.dtype(message.dtype);
/// }`. `body` is a BodyReader or a BodyWriter.
class BodyReader {
 public:
  explicit BodyReader(const Header& header) : body_(header.body.data()) {}

  void dtype(DType& value) const { value = static_cast<DType>(body_[kDTypeAt]); }
  void flag(unsigned bit, bool& value) const { value = (std::to_integer<unsigned>(body_[kFlagsAt]) & bit) != 0; }
  void flag_unless(unsigned bit, bool& value) const { value = (std::to_integer<unsigned>(body_[kFlagsAt]) & bit) == 0; }
  void code(std::uint8_t& value) const { value = std::to_integer<std::uint8_t>(body_[kCodeAt]); }
  template <typename T>
  void number(T& value) {
    check_room(at_, sizeof value);
    std::memcpy(&value, body_ + at_, sizeof value);
    at_ += sizeof value;
  }

 private:
  const std::byte* const body_;
  std::size_t at_ = kNumbersAt;
};

class BodyWriter {
 public:
  /// The header's body must be zero.
  explicit BodyWriter(Header& header) : body_(header.body.data()) {}

  void dtype(const DType& value) { body_[kDTypeAt] = static_cast<std::byte>(value); }
  void flag(unsigned bit, const bool& value) {
    if (value) body_[kFlagsAt] |= static_cast<std::byte>(bit);
  }
  void flag_unless(unsigned bit, const bool& value) { flag(bit, !value); }
  void code(const std::uint8_t& value) { body_[kCodeAt] = std::byte{value}; }
  template <typename T>
  void number(const T& value) {
    check_room(at_, sizeof value);
    std::memcpy(body_ + at_, &value, sizeof value);
    at_ += sizeof value;
  }

 private:
  std::byte* const body_;
  std::size_t at_ = kNumbersAt;
};

template <typename Message, typename Fields>
Message read_body(const Header& header, Fields fields) {
  Message message;
  BodyReader reader(header);
  fields(reader, message);
  return message;
}

/// Returns a message of this kind about `about`.
template <typename Message, typename Fields>
Header make_header(const Envelope& about, Kind kind, const Message& message, Fields fields) {
  Header header{about, {}};
  header.kind = kind;
  BodyWriter writer(header);
  fields(writer, message);
  return header;
}

}  // namespace poseidon::wire
