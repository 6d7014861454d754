#include "wire/messages/sending.h"

#include "wire/body.h"

namespace poseidon::wire {

namespace {

constexpr auto kHoldFields = [](auto& body, auto& message) { body.number(message.microseconds); };
constexpr auto kRateFields = [](auto& body, auto& message) { body.number(message.bytes_per_second); };

constexpr Envelope kUrgent{.priority = kFirstPriority};  // it overtakes data

}  // namespace

constinit const BodyShape BodyShapes::hold = shape_of<Hold>(kHoldFields);
constinit const BodyShape BodyShapes::rate = shape_of<Rate>(kRateFields);

Hold Hold::read(const Header& header) { return read_body<Hold>(header, kHoldFields); }

Header Hold::make() const { return make_header(kUrgent, Kind::hold, *this, kHoldFields); }

Rate Rate::read(const Header& header) { return read_body<Rate>(header, kRateFields); }

Header Rate::make() const { return make_header(kUrgent, Kind::rate, *this, kRateFields); }

}  // namespace poseidon::wire
