// Flight records: the files that say what a process knew when its job failed (docs/flight-records.md).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <string>
#include <string_view>
#include <thread>

#include "base/flight_recorder.h"
#include "base/json_writer.h"
#include "poseidon/status.h"

namespace poseidon {

/// How a process learnt that the job has failed.
enum class FailureSource : std::uint8_t {
  own,          // it ended the job itself
  told,         // another process said so
  lost,         // a connection ended
  left,         // another process has shut down too early
  silent,       // nothing came for too long
  refused,      // a server refused a request
  unreachable,  // a connection could not be made
  found,        // what came does not fit
};
std::string_view failure_source_name(FailureSource source);

/// What every record begins with.
struct FlightRecordHead {
  std::string process;  // "worker" or "server"
  std::string job;
  std::string run;  // equal for the processes of one membership; empty before they have met
  std::uint32_t generation = 0;
  int rank = -1;  // -1: a server of its own
  int slot = -1;
  int world_size = 0;
  std::string_view phase;  // "meeting", "linking" or "running"
  double timeout_s = 0;
  Status error;
  FailureSource source = FailureSource::found;
  FlightEvent::Party party = FlightEvent::Party::none;  // whom the source is about
  std::uint32_t index = kNoFlightId;
  std::int64_t time_ns = 0;  // monotonic
  std::int64_t wall_ns = 0;
};

/// Opens the document's object and writes the head's fields; the caller goes on and closes it.
void write_head(JsonWriter& json, const FlightRecordHead& head);

/// A name in `directory` that no other record has: poseidon-JOB-WHO-TIME-PID.json.
std::string flight_record_path(const std::string& directory, const std::string& job, const std::string& who,
                               std::int64_t wall_ns);

/// Makes the directory where it is missing. ErrorCode::unreachable where no file can be written there.
Status open_record_directory(const std::string& directory);

/// Writes the file as a whole or not at all, readable by this user alone, and removes the oldest of this process and
/// job beyond kKeptRecords. Those that other processes have left under the same job and rank go after
/// kOthersRecordsStay.
inline constexpr std::size_t kKeptRecords = 8;
inline constexpr auto kOthersRecordsStay = std::chrono::hours(7 * 24);
Status write_flight_record(const std::string& path, const std::string& text);

/// Writes a record on a thread of its own. Owner's thread only.
class FlightRecordWriter {
 public:
  FlightRecordWriter() = default;
  ~FlightRecordWriter() { wait(); }
  FlightRecordWriter(const FlightRecordWriter&) = delete;
  FlightRecordWriter& operator=(const FlightRecordWriter&) = delete;

  /// Once. `make_text` runs on the writer's thread; what it uses must live until `wait` has returned.
  void start(std::string path, std::function<std::string()> make_text);
  /// Returns when `make_text` has run and the file is there; a disk that takes longer than 2 s is left to itself.
  void wait();

 private:
  std::thread thread_;
  std::future<void> made_;
  std::future<void> written_;
};

}  // namespace poseidon
