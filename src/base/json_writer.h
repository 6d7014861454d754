// JsonWriter: writes one JSON document piece by piece.
#pragma once

#include <concepts>
#include <string>
#include <string_view>

namespace poseidon {

/// It writes commas and escapes; the caller is responsible for the nesting. Each byte that is not UTF-8 is written as
/// U+FFFD.
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
  /// Writes a number with three decimal places at most.
  JsonWriter& value(double number);
  JsonWriter& null() { return raw("null"); }

  template <typename T>
  JsonWriter& field(std::string_view name, const T& content) {
    return key(name).value(content);
  }
  /// Writes another document as a value.
  JsonWriter& raw(std::string_view json);

  const std::string& text() const { return text_; }

 private:
  JsonWriter& open(char bracket);
  JsonWriter& close(char bracket);
  void separate();
  void append_quoted(std::string_view text);

  std::string text_;
  bool first_ = true;  // the next value is the first of its array or object
};

}  // namespace poseidon
