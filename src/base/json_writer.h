// JsonWriter: one JSON document, piece by piece.
#pragma once

#include <concepts>
#include <cstddef>
#include <string>
#include <string_view>

namespace poseidon {

/// Commas and escapes are its business, the nesting is the caller's. Text that is not UTF-8 comes out with
/// U+FFFD for each wrong byte.
class JsonWriter {
 public:
  JsonWriter& begin_object() { return open('{'); }
  JsonWriter& end_object() { return close('}'); }
  JsonWriter& begin_array() { return open('['); }
  JsonWriter& end_array() { return close(']'); }
  JsonWriter& key(std::string_view name);

  JsonWriter& value(std::string_view text);
  JsonWriter& value(const char* text) { return value(std::string_view(text)); }
  JsonWriter& value(bool truth) { return raw(truth ? "true" : "false"); }
  template <std::integral T>
  requires(!std::same_as<T, bool>) JsonWriter& value(T number) { return raw(std::to_string(number)); }
  /// With a thousandth as the smallest part.
  JsonWriter& value(double number);
  JsonWriter& null() { return raw("null"); }

  template <typename T>
  JsonWriter& field(std::string_view name, const T& content) {
    return key(name).value(content);
  }
  /// Another document as a value.
  JsonWriter& raw(std::string_view json);

  const std::string& text() const { return text_; }

 private:
  JsonWriter& open(char bracket);
  JsonWriter& close(char bracket);
  void separate();
  void append_quoted(std::string_view text);

  std::string text_;
  bool first_ = true;  // nothing stands before the next value in its array or object
};

}  // namespace poseidon
