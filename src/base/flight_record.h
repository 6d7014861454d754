// Flight records: files with what a process knew when its job failed (docs/flight-records.md).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "base/flight_recorder.h"
#include "base/json_writer.h"
#include "base/one_thread.h"
#include "base/pinned.h"
#include "base/thread.h"
#include "poseidon/status.h"

namespace poseidon {

/// How a process learnt that the job has failed.
enum class FailureSource : std::uint8_t {
  own,          // it ended the job itself
  told,         // another process told it
  lost,         // a connection ended
  left,         // another process has shut down too early
  silent,       // nothing arrived for too long
  refused,      // a server refused a request
  unreachable,  // a connection could not be made
  found,        // it received something that does not fit
};
std::string_view failure_source_name(FailureSource source);

/// The fields with which every record begins.
struct FlightRecordHead {
  std::string process;  // "worker" or "server"
  std::string job;
  std::string run;  // equal for the processes of one membership; empty before they have met
  std::uint32_t generation = 0;
  int rank = -1;  // -1: a dedicated server
  int slot = -1;
  int world_size = 0;
  std::string_view phase;  // "meeting", "linking" or "running"
  double timeout_s = 0;
  Status error;
  FailureSource source = FailureSource::found;
  FlightEvent::Party party = FlightEvent::Party::none;  // which kind of process the source is about
  std::uint32_t index = kNoFlightId;
  std::int64_t time_ns = 0;  // monotonic
  std::int64_t wall_ns = 0;
};

/// Opens the document's object and writes the head's fields. The caller writes the rest and closes the object.
void write_head(JsonWriter& json, const FlightRecordHead& head);

/// A path in `directory` that no other record has: poseidon-JOB-WHO-TIME-PID.json.
std::string flight_record_path(const std::string& directory, const std::string& job, const std::string& who,
                               std::int64_t wall_ns);

/// Makes the directory if it is missing. ErrorCode::unreachable: no file can be written there.
Status open_record_directory(const std::string& directory);

/// Writes the file as a whole or not at all. Only this user can read it. Removes the oldest records of this process and
/// job beyond kKeptRecords, and those of other processes with the same job and rank after kOthersRecordsStay.
inline constexpr std::size_t kKeptRecords = 8;
inline constexpr auto kOthersRecordsStay = std::chrono::hours(7 * 24);
Status write_flight_record(const std::string& path, const std::string& text);

/// Writes a record on a separate thread. One thread at a time calls it: the one on which the job fails, and later the
/// one that destroys this.
class FlightRecordWriter : private Pinned {
 public:
  ~FlightRecordWriter() { wait(); }

  /// Starts writing; may be called once. `make_text` runs on the writer's thread, and what it uses must live until
  /// `wait` has returned.
  void start(std::string path, std::function<std::string()> make_text);
  /// Returns when `make_text` has run and the file exists, or after 2 s if the disk is slow.
  void wait();

 private:
  Thread thread_;
  Completion made_;
  Completion written_;
  [[no_unique_address]] OneThread one_thread_{"FlightRecordWriter"};
};

}  // namespace poseidon
