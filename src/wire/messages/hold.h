// hold: a worker asks a server to send nothing less urgent to it for a while.
#pragma once

#include <cstdint>

#include "wire/header.h"

namespace poseidon::wire {

/// hold: the server core sends nothing to this worker over its connections of less urgent classes, for at most this
/// time. It is for the class of the connection over which it comes. No payload.
struct Hold {
  std::uint64_t microseconds = 0;  // 0: go on

  static Hold read(const Header& header);
  Header make() const;

  bool operator==(const Hold&) const = default;
};

}  // namespace poseidon::wire
