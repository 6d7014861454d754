#include "wire/messages/life.h"

#include "wire/body.h"

namespace poseidon::wire {

namespace {

constexpr auto kHeartbeatFields = [](auto& body, auto& message) { body.number(message.level); };

}  // namespace

constinit const BodyShape BodyShapes::heartbeat = shape_of<Heartbeat>(kHeartbeatFields);
constinit const BodyShape BodyShapes::waiting{};

Heartbeat Heartbeat::read(const Header& header) { return read_body<Heartbeat>(header, kHeartbeatFields); }

Header Heartbeat::make() const {
  return make_header({.priority = kFirstPriority}, Kind::heartbeat, *this, kHeartbeatFields);
}

Waiting Waiting::read(std::span<const std::byte> payload) { return {as_text(payload)}; }

TextMessage Waiting::make() const {
  Header header;
  header.kind = Kind::waiting;
  return with_text(header, text);
}

}  // namespace poseidon::wire
