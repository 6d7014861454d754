#include "wire/messages.h"

#include <algorithm>

namespace poseidon::wire {

namespace {

std::string as_text(std::span<const std::byte> payload) {
  return {reinterpret_cast<const char*>(payload.data()), payload.size()};
}

TextMessage with_text(Header header, std::string text) {
  text.resize(std::min(text.size(), kMaxTextBytes));
  header.payload_bytes = text.size();
  return {header, std::make_shared<const std::string>(std::move(text))};
}

}  // namespace

TextMessage make_hello(const Hello& hello) {
  Header header;
  header.kind = Kind::hello;
  header.rank = hello.rank;
  header.worker_count = hello.worker_count;
  return with_text(header, hello.job);
}

TextMessage make_error(Kind kind, const Header& about, const Status& status) {
  Header header;
  header.kind = kind;
  header.rank = about.rank;
  header.worker_count = about.worker_count;
  header.unit = about.unit;
  header.chunk = about.chunk;
  header.step = about.step;
  header.divisor = static_cast<std::uint32_t>(status.code());
  return with_text(header, status.message());
}

Hello read_hello(const Header& header, std::span<const std::byte> payload) {
  return {header.rank, header.worker_count, as_text(payload)};
}

Status read_error(const Header& header, std::span<const std::byte> payload) {
  const bool known = header.divisor > 0 && header.divisor <= static_cast<std::uint32_t>(ErrorCode::shut_down);
  return {known ? static_cast<ErrorCode>(header.divisor) : ErrorCode::aborted, as_text(payload)};
}

}  // namespace poseidon::wire
