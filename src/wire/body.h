// How the structs of wire/messages/ lie in Header::body. One list of fields serves for reading, for writing, and for
// the check of what has been received.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "poseidon/dtype.h"
#include "wire/header.h"

namespace poseidon::wire {

// Every body begins with a dtype, flags, a code and a zero byte. Each of them is zero if the kind does not have it.
// Numbers follow.
inline constexpr std::size_t kDTypeAt = 0;
inline constexpr std::size_t kFlagsAt = 1;
inline constexpr std::size_t kCodeAt = 2;
inline constexpr std::size_t kNumbersAt = 4;

/// What the body of a kind may have.
struct BodyShape {
  bool has_dtype = false;                           // then the dtype must be known
  std::array<std::uint8_t, kBodyBytes> may_have{};  // the bits that need not be zero
};

/// By the name of the kind. The struct of the kind defines its own: `constinit const BodyShape BodyShapes::pull =
/// shape_of<Pull>(kPullFields);`
struct BodyShapes {
#define POSEIDON_KIND(name, ...) static const BodyShape name;
#include "wire/kinds.def"
};

/// `kind` must have been decoded, or be a value of Kind.
const BodyShape& shape_of(Kind kind);

/// A kind names its fields once, in the order of the wire: `[](auto& body, auto& message) { body.dtype(message.dtype);
/// }`. `body` is a BodyReader, a BodyWriter or a BodyMeasure.
class BodyReader {
 public:
  explicit BodyReader(const Header& header) : body_(header.body.data()) {}

  void dtype(DType& value) const { value = static_cast<DType>(body_[kDTypeAt]); }
  void flag(unsigned bit, bool& value) const { value = (std::to_integer<unsigned>(body_[kFlagsAt]) & bit) != 0; }
  void flag_unless(unsigned bit, bool& value) const { value = (std::to_integer<unsigned>(body_[kFlagsAt]) & bit) == 0; }
  void code(std::uint8_t& value) const { value = std::to_integer<std::uint8_t>(body_[kCodeAt]); }
  template <typename T>
  void number(T& value) {
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
  void flag(unsigned bit, const bool& value) { flags_ |= value ? bit : 0; }
  void flag_unless(unsigned bit, const bool& value) { flag(bit, !value); }
  void code(const std::uint8_t& value) { body_[kCodeAt] = std::byte{value}; }
  template <typename T>
  void number(const T& value) {
    std::memcpy(body_ + at_, &value, sizeof value);
    at_ += sizeof value;
  }
  /// Writes the flags, which are kept until then so that each of them need not read what the last one has written.
  void finish() { body_[kFlagsAt] = static_cast<std::byte>(flags_); }

 private:
  std::byte* const body_;
  std::size_t at_ = kNumbersAt;
  unsigned flags_ = 0;
};

/// Notes which bits the fields take. It works when the program is compiled, and fields that a body cannot hold do not
/// compile.
class BodyMeasure {
 public:
  constexpr void dtype(const DType& /*value*/) {
    shape_.has_dtype = true;
    shape_.may_have[kDTypeAt] = 0xff;
  }
  constexpr void flag(unsigned bit, const bool& /*value*/) {
    shape_.may_have[kFlagsAt] = static_cast<std::uint8_t>(shape_.may_have[kFlagsAt] | bit);
  }
  constexpr void flag_unless(unsigned bit, const bool& value) { flag(bit, value); }
  constexpr void code(const std::uint8_t& /*value*/) { shape_.may_have[kCodeAt] = 0xff; }
  template <typename T>
  constexpr void number(const T& /*value*/) {
    if (at_ + sizeof(T) > kBodyBytes) throw std::length_error("a body has no room for this number");
    for (std::size_t end = at_ + sizeof(T); at_ < end; ++at_) shape_.may_have[at_] = 0xff;
  }
  constexpr const BodyShape& shape() const { return shape_; }

 private:
  BodyShape shape_;
  std::size_t at_ = kNumbersAt;
};

template <typename Message, typename Fields>
consteval BodyShape shape_of(Fields fields) {
  Message message;
  BodyMeasure measure;
  fields(measure, message);
  return measure.shape();
}

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
  writer.finish();
  return header;
}

}  // namespace poseidon::wire
