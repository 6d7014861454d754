// CoreJobReport: what one core of a server knows of a job.
#pragma once

#include <cstdint>
#include <set>

#include "poseidon/server.h"
#include "server/core/tenants.h"

namespace poseidon {

/// The fields of `report` that a core alone does not know are not set: secret, worker counts, age and silence.
struct CoreJobReport {
  JobName name;
  JobReport report;
  std::set<std::uint32_t> connected_ranks;
  std::int64_t began_ns = 0;
  std::int64_t last_progress_ns = 0;
};

}  // namespace poseidon
