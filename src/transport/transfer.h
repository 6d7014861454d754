// Transfer: what came of reading from or writing to a connection that does not block.
#pragma once

#include <cstddef>
#include <cstdint>

namespace poseidon {

struct Transfer {
  enum class Outcome : std::uint8_t {
    done,     // `bytes` of what was asked; fewer: the rest would have to wait
    blocked,  // nothing now
    ended,    // the peer has closed its side
    failed,   // whoever did it says why
  };
  Outcome outcome = Outcome::done;
  std::size_t bytes = 0;
};

}  // namespace poseidon
