// FlightRecorder: keeps the last events of one loop in case its job fails (docs/flight-records.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/json_writer.h"
#include "base/one_thread.h"

namespace poseidon {

inline constexpr std::uint32_t kNoFlightId = 0xffffffffu;

/// One thing that a loop did. `what` has static storage: a message's kind, a scheme, an error code.
struct FlightEvent {
  enum class Kind : std::uint8_t {
    connected,  // a flow was made
    greeted,    // its hello arrived
    message,    // a message is complete
    sent,       // a message was given to its flow
    start,      // a unit's exchange started
    complete,   // a unit's exchange completed
    refused,    // a request was refused
    left,       // a goodbye arrived
    closed,     // a flow ended
    overdue,    // a chunk has waited too long
    failed,     // the job failed here
  };
  enum class Party : std::uint8_t { none, peer, server, worker };  // what is at the other end

  std::int64_t time_ns = 0;
  const char* what = "";
  std::uint64_t step = 0;
  std::uint64_t bytes = 0;
  std::uint32_t unit = kNoFlightId;
  std::uint32_t chunk = kNoFlightId;
  std::uint32_t index = kNoFlightId;  // rank or server at the other end
  std::uint16_t lane = 0;             // which of the flows to it
  Kind kind = Kind::message;
  Party party = Party::none;
};
static_assert(sizeof(FlightEvent) <= 48, "one is written for every message");

std::string_view flight_event_name(FlightEvent::Kind kind);
std::string_view flight_party_name(FlightEvent::Party party);

/// A copy of a recorder's events, for another thread.
struct FlightEvents {
  std::vector<FlightEvent> events;  // the oldest first
  std::uint64_t forgotten_count = 0;
};

/// It neither locks nor allocates after its construction. Only its loop's thread uses it.
class FlightRecorder {
 public:
  static constexpr std::size_t kEventCount = 4096;

  FlightRecorder() : ring_(kEventCount) {}

  /// Adds an event. A `time_ns` of 0 means now.
  void note(FlightEvent event) {
    one_thread_.check();
    if (event.time_ns == 0) event.time_ns = now_ns();
    ring_[static_cast<std::size_t>(count_++ % kEventCount)] = event;
  }

  FlightEvents events() const;

 private:
  std::vector<FlightEvent> ring_;
  std::uint64_t count_ = 0;
  [[no_unique_address]] OneThread one_thread_{"FlightRecorder"};
};

/// Writes an object with the keys "loop", "forgotten", "columns" and "events". Times are in µs relative to `now_ns`.
void write_events(JsonWriter& json, std::string_view loop, const FlightEvents& events, std::int64_t now_ns);

}  // namespace poseidon
