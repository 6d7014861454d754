// What there is in a directory of server checkpoints (docs/checkpoints.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "poseidon/status.h"

namespace poseidon {

/// The `version_limit` of Client::restore that accepts no version: the job begins anew although there are versions.
inline constexpr std::uint64_t kNoVersion = ~std::uint64_t{0};

/// One version of one job: what its servers kept after a step.
struct CheckpointListing {
  std::string job;
  std::uint64_t version = 0;  // the step
  std::uint64_t run = 0;      // of the job; one that began later has a higher number
  std::size_t file_count = 0;
  std::size_t unit_count = 0;    // layers
  std::uint64_t size_bytes = 0;  // of the files
  bool complete = false;         // every chunk is there and, with `verify`, every byte is right
  std::string problem;           // what is damaged or missing; empty for a complete version
};

/// Lists the versions in a directory by job, the newest version first. With `verify` it reads all data, otherwise only
/// the heads of the files. ErrorCode::unreachable: the directory cannot be read.
Result<std::vector<CheckpointListing>> list_checkpoints(const std::string& directory, bool verify);

}  // namespace poseidon
