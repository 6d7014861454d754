// Transfer: the result of a read from, or a write to, a nonblocking connection.
#pragma once

#include <cstddef>
#include <cstdint>

namespace poseidon {

struct Transfer {
  enum class Outcome : std::uint8_t {
    done,     // `bytes` were moved; if these are fewer than asked for, the rest would have to wait
    blocked,  // nothing can be moved now
    ended,    // the peer has closed its side
    failed,   // the caller knows why
  };
  Outcome outcome = Outcome::done;
  std::size_t bytes = 0;
};

}  // namespace poseidon
