#include "base/flight_recorder.h"

#include <algorithm>

namespace poseidon {

namespace {

constexpr std::array<std::string_view, 10> kColumns{"time_us", "event", "what",  "party", "index",
                                                    "lane",    "unit",  "chunk", "step",  "bytes"};

void write_id(JsonWriter& json, std::uint32_t id) {
  if (id == kNoFlightId)
    json.null();
  else
    json.value(id);
}

}  // namespace

std::string_view flight_event_name(FlightEvent::Kind kind) {
  constexpr std::array<std::string_view, 11> names{"connected", "greeted", "message", "sent",    "start", "complete",
                                                   "refused",   "left",    "closed",  "overdue", "failed"};
  return names[static_cast<std::size_t>(kind)];
}

std::string_view flight_party_name(FlightEvent::Party party) {
  constexpr std::array<std::string_view, 4> names{"none", "peer", "server", "worker"};
  return names[static_cast<std::size_t>(party)];
}

FlightEvents FlightRecorder::events() const {
  one_thread_.check();
  const std::uint64_t kept = std::min<std::uint64_t>(count_, kEventCount);
  FlightEvents copy;
  copy.forgotten_count = count_ - kept;
  copy.events.reserve(static_cast<std::size_t>(kept));
  for (std::uint64_t i = count_ - kept; i < count_; ++i)
    copy.events.push_back(ring_[static_cast<std::size_t>(i % kEventCount)]);
  return copy;
}

void write_events(JsonWriter& json, std::string_view loop, const FlightEvents& events, std::int64_t now_ns) {
  json.begin_object().field("loop", loop).field("forgotten", events.forgotten_count);
  json.key("columns").begin_array();
  for (const auto column : kColumns) json.value(column);
  json.end_array().key("events").begin_array();
  for (const FlightEvent& event : events.events) {
    json.begin_array().value((event.time_ns - now_ns) / 1000).value(flight_event_name(event.kind)).value(event.what);
    json.value(flight_party_name(event.party));
    write_id(json, event.index);
    json.value(event.lane);
    write_id(json, event.unit);
    write_id(json, event.chunk);
    json.value(event.step).value(event.bytes).end_array();
  }
  json.end_array().end_object();
}

}  // namespace poseidon
