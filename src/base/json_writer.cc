#include "base/json_writer.h"

#include <array>
#include <cmath>
#include <cstdio>

#include "base/utf8.h"

namespace poseidon {

namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";  // U+FFFD

}  // namespace

void JsonWriter::separate() {
  if (!first_) text_ += ',';
  first_ = false;
}

JsonWriter& JsonWriter::open(char bracket) {
  separate();
  text_ += bracket;
  first_ = true;
  return *this;
}

JsonWriter& JsonWriter::close(char bracket) {
  text_ += bracket;
  first_ = false;
  return *this;
}

JsonWriter& JsonWriter::key(std::string_view name) {
  separate();
  append_quoted(name);
  text_ += ':';
  first_ = true;
  return *this;
}

JsonWriter& JsonWriter::value(std::string_view text) {
  separate();
  append_quoted(text);
  return *this;
}

JsonWriter& JsonWriter::value(double number) {
  if (!std::isfinite(number)) return null();
  std::array<char, 340> digits{};  // the largest double has 309 before the point
  std::snprintf(digits.data(), digits.size(), "%.3f", number);
  return raw(digits.data());
}

JsonWriter& JsonWriter::raw(std::string_view json) {
  separate();
  text_ += json;
  return *this;
}

void JsonWriter::append_quoted(std::string_view text) {
  text_ += '"';
  while (!text.empty()) {
    const std::size_t size = utf8_sequence_bytes(text);
    const char c = text[0];
    if (size == 0) {
      text_ += kReplacement;
    } else if (c == '"' || c == '\\') {
      text_ += {'\\', c};
    } else if (static_cast<unsigned char>(c) < 0x20) {
      std::array<char, 8> escape{};
      std::snprintf(escape.data(), escape.size(), "\\u%04x", static_cast<unsigned>(c));
      text_ += escape.data();
    } else {
      text_ += text.substr(0, size);
    }
    text.remove_prefix(size == 0 ? 1 : size);
  }
  text_ += '"';
}

}  // namespace poseidon
