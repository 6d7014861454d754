// hold and rate: how much a process may send, which the one that receives it says.
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

/// rate: the worker's share of the server's port. It holds for the connection over which it comes, until the next one.
/// No payload.
struct Rate {
  std::uint64_t bytes_per_second = 0;  // 0: no limit

  static Rate read(const Header& header);
  Header make() const;

  bool operator==(const Rate&) const = default;
};

}  // namespace poseidon::wire
