// FailureReport: what a client says when its job fails. It describes what was awaited, and writes the flight record.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "base/flight_record.h"
#include "base/one_thread.h"
#include "client/connections.h"
#include "client/flight_report.h"
#include "client/steps.h"
#include "client/unit_state.h"
#include "collective/collectives.h"
#include "poseidon/options.h"

namespace poseidon {

/// What this process is among the members of its generation, besides its rank.
struct Seat {
  int slot = 0;          // the rank that it was started with
  bool joining = false;  // as Client::joining
};

/// Only the loop's thread uses it, except for the methods that name other threads.
class FailureReport {
 public:
  /// Adds what the embedded server knows to a record, as one value with times relative to `time_ns`.
  using WriteServer = std::function<void(JsonWriter& json, std::int64_t time_ns)>;
  /// The file of a record that is to be written.
  struct Record {
    std::string path;
    std::int64_t time_of_day_ns = 0;
  };

  /// All arguments must outlive this object. `units` has the client's units by id.
  FailureReport(const Options& options, const Seat& seat, const Connections& connections, const Steps& steps,
                const std::map<std::uint32_t, UnitState*>& units, const Collectives& collectives);

  /// Makes the directory of flight records, if the options name one. An error says why no records will be written. Call
  /// it before anything else.
  Status open_directory();
  /// What the function uses must live until wait() has returned.
  void set_server(WriteServer write_server) { one_thread_.checked(write_server_) = std::move(write_server); }

  /// Describes what the started exchanges wait for.
  std::string describe_waiting() const;
  /// Returns the file for a failure that happens now, or nothing if no record is written for it.
  std::optional<Record> new_record(const FailureCause& cause) const;
  /// Notes what the client knows now, and writes it on another thread. May be called once.
  void write(const Record& record, const Status& status, const FailureCause& cause);
  /// Returns when the record has been written, or after 2 s if the disk is slow. Only the thread that destroys the
  /// client calls it.
  void wait() { writer_.wait(); }

 private:
  FlightReport make_report(const Status& status, const FailureCause& cause, std::int64_t time_of_day_ns) const;

  const Options& options_;
  const Seat& seat_;
  const Connections& connections_;
  const Steps& steps_;
  const std::map<std::uint32_t, UnitState*>& units_;
  const Collectives& collectives_;
  std::string directory_;  // empty: no flight records
  WriteServer write_server_;
  FlightRecordWriter writer_;
  [[no_unique_address]] OneThread one_thread_{"FailureReport"};
};

}  // namespace poseidon
