#include "server/server_records.h"

#include <utility>

#include "base/clock.h"
#include "base/flight_record.h"

namespace poseidon {

namespace {
// Reports of several cores and connections within this time are one failure.
constexpr std::int64_t kOneFailureNs = 5'000'000'000;
}  // namespace

ServerRecords::ServerRecords(std::string directory, std::chrono::milliseconds timeout,
                             std::function<void(JsonWriter&, std::int64_t)> report)
    : directory_(std::move(directory)), timeout_(timeout), report_(std::move(report)) {}

bool ServerRecords::is_new(const std::string& job) {
  const std::lock_guard lock(mutex_);
  const std::int64_t time_ns = now_ns();
  std::erase_if(written_ns_, [time_ns](const auto& entry) { return time_ns - entry.second > kOneFailureNs; });
  return written_ns_.emplace(job, time_ns).second;
}

void ServerRecords::write(const JobFailure& failure) {
  if (!is_new(failure.job)) return;
  FlightRecordHead head;
  head.process = "server";
  head.job = failure.job;
  head.generation = failure.generation;
  head.world_size = static_cast<int>(failure.worker_count);
  head.phase = "running";
  head.timeout_s = std::chrono::duration<double>(timeout_).count();
  head.error = failure.status;
  head.source = failure.source;
  head.party = FlightEvent::Party::worker;
  head.index = failure.rank;
  head.time_ns = now_ns();
  head.wall_ns = wall_ns();
  writer_.run(
      1,
      [this, head](std::size_t) {
        JsonWriter json;
        write_head(json, head);
        report_(json.key("server"), head.time_ns);
        const std::string path = flight_record_path(directory_, head.job, "server", head.wall_ns);
        // A failed write has nobody to be reported to, and the workers know what has happened.
        static_cast<void>(write_flight_record(path, json.end_object().text()));
      },
      [] {});
}

}  // namespace poseidon
