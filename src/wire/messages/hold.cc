#include "wire/messages/hold.h"

#include "wire/body.h"

namespace poseidon::wire {

namespace {

constexpr auto kHoldFields = [](auto& body, auto& message) { body.number(message.microseconds); };

}  // namespace

constinit const BodyShape BodyShapes::hold = shape_of<Hold>(kHoldFields);

Hold Hold::read(const Header& header) { return read_body<Hold>(header, kHoldFields); }

Header Hold::make() const {
  Envelope about;
  about.priority = kFirstPriority;  // it overtakes data
  return make_header(about, Kind::hold, *this, kHoldFields);
}

}  // namespace poseidon::wire
