#include "wire/messages/stored.h"

#include "wire/body.h"

namespace poseidon::wire {

namespace {

constexpr auto kAssignFields = [](auto& body, auto& message) {
  body.dtype(message.dtype);
  body.flag(1, message.float32_value);
  body.number(message.array);
  body.number(message.update_count);
};

constexpr auto kPullFields = [](auto& body, auto& message) {
  body.flag(1, message.as_bfloat16);
  body.flag_unless(2, message.wants_payload);
  body.number(message.array);
};

constexpr auto kRestoreFields = [](auto& body, auto& message) {
  body.dtype(message.dtype);
  body.flag(1, message.as_bfloat16);
  body.number(message.version_limit);
};

constexpr auto kValueFields = [](auto& body, auto& message) {
  body.dtype(message.dtype);
  body.flag(1, message.absent);
  body.number(message.array);
  body.number(message.update_count);
  body.number(message.version);
};

}  // namespace

constinit const BodyShape BodyShapes::assign = shape_of<Assign>(kAssignFields);
constinit const BodyShape BodyShapes::pull = shape_of<Pull>(kPullFields);
constinit const BodyShape BodyShapes::restore = shape_of<Restore>(kRestoreFields);
constinit const BodyShape BodyShapes::value = shape_of<Value>(kValueFields);

Assign Assign::read(const Header& header) { return read_body<Assign>(header, kAssignFields); }

Header Assign::make(const Envelope& about) const { return make_header(about, Kind::assign, *this, kAssignFields); }

Pull Pull::read(const Header& header) { return read_body<Pull>(header, kPullFields); }

Header Pull::make(const Envelope& about) const { return make_header(about, Kind::pull, *this, kPullFields); }

Restore Restore::read(const Header& header) { return read_body<Restore>(header, kRestoreFields); }

Header Restore::make(const Envelope& about) const { return make_header(about, Kind::restore, *this, kRestoreFields); }

Value Value::read(const Header& header) { return read_body<Value>(header, kValueFields); }

Header Value::make(const Envelope& about) const { return make_header(about, Kind::value, *this, kValueFields); }

}  // namespace poseidon::wire
