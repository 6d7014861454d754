// FlightReport: what a client knew when its job failed, for its flight record (docs/flight-records.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/flight_record.h"
#include "base/flight_recorder.h"
#include "scheme/exchange.h"
#include "wire/header.h"

namespace poseidon {

/// The state of a connection at the failure, or at its own end if that came before.
struct LinkReport {
  FlightEvent::Party party = FlightEvent::Party::none;
  std::uint32_t index = kNoFlightId;  // rank or server
  std::size_t lane = 0;
  std::string host;  // empty: not known
  std::string address;
  bool connected = true;
  bool greeted = false;
  bool left = false;
  std::int64_t last_progress_ns = 0;
  TrafficStats traffic;
  std::optional<wire::Header> receiving;  // a message whose payload is not complete
  std::size_t received_bytes = 0;         // of that message
};

/// An exchange that is not complete.
struct WaitingReport {
  std::string layer;
  std::uint32_t unit = 0;
  std::string scheme;
  std::uint64_t step = 0;
  std::string waiting_for;
  std::vector<std::size_t> ranks;    // ranks whose parts are missing
  std::vector<std::size_t> servers;  // servers whose results are missing
  std::size_t chunks_missing = 0;
  std::size_t sends_pending = 0;
};

WaitingReport report_of(const Exchange& exchange, std::string waiting_for);

struct FlightReport {
  FlightRecordHead head;
  std::string not_linked;  // the processes that have not greeted
  std::vector<LinkReport> links;
  std::vector<WaitingReport> waiting;  // only the first ones
  std::size_t waiting_count = 0;
  std::map<std::uint32_t, std::string> units;  // the names of the units in the events
  FlightEvents events;
};

/// `write_server` adds what the embedded server knows as one value, with times relative to its argument. It may be
/// empty.
std::string to_json(const FlightReport& report, const std::function<void(JsonWriter&, std::int64_t)>& write_server);

}  // namespace poseidon
