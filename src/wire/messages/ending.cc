#include "wire/messages/ending.h"

#include "wire/body.h"

namespace poseidon::wire {

namespace {

/// What refuse and abort say in the header.
struct Ending {
  std::uint8_t code = 0;       // ErrorCode
  bool flag = false;           // refuse: there is a departed rank; abort: it is planned
  std::uint32_t departed = 0;  // refuse
};

constexpr auto kRefuseFields = [](auto& body, auto& message) {
  body.code(message.code);
  body.flag(1, message.flag);
  body.number(message.departed);
};

constexpr auto kAbortFields = [](auto& body, auto& message) {
  body.code(message.code);
  body.flag(1, message.flag);
};

Status status_of(std::uint8_t code, std::span<const std::byte> payload) {
  const bool known = code > 0 && code <= static_cast<std::uint8_t>(ErrorCode::evicted);
  return {known ? static_cast<ErrorCode>(code) : ErrorCode::aborted, as_text(payload)};
}

}  // namespace

constinit const BodyShape BodyShapes::refuse = shape_of<Ending>(kRefuseFields);
constinit const BodyShape BodyShapes::abort = shape_of<Ending>(kAbortFields);
constinit const BodyShape BodyShapes::goodbye{};

Refuse Refuse::read(const Header& header, std::span<const std::byte> payload) {
  const auto body = read_body<Ending>(header, kRefuseFields);
  return {status_of(body.code, payload), body.flag ? std::optional(body.departed) : std::nullopt};
}

TextMessage Refuse::make(const Envelope& request) const {
  Envelope about = request;
  about.priority = kFirstPriority;  // it overtakes data
  const Ending body{static_cast<std::uint8_t>(status.code()), departed_rank.has_value(), departed_rank.value_or(0)};
  return with_text(make_header(about, Kind::refuse, body, kRefuseFields), status.message());
}

Abort Abort::read(const Header& header, std::span<const std::byte> payload) {
  const auto body = read_body<Ending>(header, kAbortFields);
  return {status_of(body.code, payload), body.flag};
}

TextMessage Abort::make() const {
  const Ending body{static_cast<std::uint8_t>(status.code()), planned, 0};
  return with_text(make_header({}, Kind::abort, body, kAbortFields), status.message());
}

Header Goodbye::make() {
  Header header;
  header.kind = Kind::goodbye;
  header.priority = kLastPriority;
  return header;
}

}  // namespace poseidon::wire
