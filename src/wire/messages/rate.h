// rate: how fast a worker may send to a server.
#pragma once

#include <cstdint>

#include "wire/header.h"

namespace poseidon::wire {

/// rate: the worker's share of the server's port. It holds for the connection over which it comes, until the next one.
/// No payload.
struct Rate {
  std::uint64_t bytes_per_second = 0;  // 0: no limit

  static Rate read(const Header& header);
  Header make() const;

  bool operator==(const Rate&) const = default;
};

}  // namespace poseidon::wire
