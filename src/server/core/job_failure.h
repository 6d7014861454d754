// JobFailure: what a server core reports when a job cannot go on.
#pragma once

#include <cstdint>
#include <string>

#include "base/flight_record.h"
#include "poseidon/status.h"

namespace poseidon {

struct JobFailure {
  std::string job;
  std::uint32_t generation = 0;
  std::uint32_t worker_count = 0;
  FailureSource source = FailureSource::lost;
  std::uint32_t rank = 0;  // the rank that the failure is about
  Status status;
};

}  // namespace poseidon
