// ServerRecords: the flight records of a dedicated server.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>

#include "base/executor.h"
#include "base/json_writer.h"
#include "server/core/job_failure.h"

namespace poseidon {

/// There is one record for each job that fails, however many cores notice it. An embedded server's part is in its
/// worker's record.
class ServerRecords {
 public:
  /// `report` adds one value: what the server knows, with times relative to its argument. It runs on a thread of this
  /// object until the object has been destroyed.
  ServerRecords(std::string directory, std::chrono::milliseconds timeout,
                std::function<void(JsonWriter&, std::int64_t time_ns)> report);

  /// Any thread may call it. It does not wait for the disk.
  void write(const JobFailure& failure);

 private:
  bool is_new(const std::string& job);

  const std::string directory_;
  const std::chrono::milliseconds timeout_;
  const std::function<void(JsonWriter&, std::int64_t)> report_;
  std::mutex mutex_;
  std::map<std::string, std::int64_t> written_ns_;  // by job: when the last record was written; under mutex_
  Executor writer_{1};
};

}  // namespace poseidon
