// ServerRecords: the flight records of a server that stands alone.
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

/// One record for each job that fails, however many cores notice. An embedded server's part is in its worker's record.
class ServerRecords {
 public:
  /// `report` adds what the server knows, as one value with times relative to its argument. It runs on a thread of
  /// this object's, until this object has been destroyed.
  ServerRecords(std::string directory, std::chrono::milliseconds timeout,
                std::function<void(JsonWriter&, std::int64_t time_ns)> report);

  /// Any thread; does not wait for the disk.
  void write(const JobFailure& failure);

 private:
  bool is_new(const std::string& job);

  const std::string directory_;
  const std::chrono::milliseconds timeout_;
  const std::function<void(JsonWriter&, std::int64_t)> report_;
  std::mutex mutex_;
  std::map<std::string, std::int64_t> written_ns_;  // by job: when last; under mutex_
  Executor writer_{1};
};

}  // namespace poseidon
