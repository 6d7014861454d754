#include "wire/messages/rate.h"

#include "wire/body.h"

namespace poseidon::wire {

namespace {

constexpr auto kRateFields = [](auto& body, auto& message) { body.number(message.bytes_per_second); };

}  // namespace

constinit const BodyShape BodyShapes::rate = shape_of<Rate>(kRateFields);

Rate Rate::read(const Header& header) { return read_body<Rate>(header, kRateFields); }

Header Rate::make() const {
  Envelope about;
  about.priority = kFirstPriority;  // it overtakes data
  return make_header(about, Kind::rate, *this, kRateFields);
}

}  // namespace poseidon::wire
