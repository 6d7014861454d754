// How many files and connections this process may have open.
#pragma once

#include <cstddef>

#include "poseidon/status.h"

namespace poseidon {

/// Raises the process's limit (`ulimit -n`), as far as the system permits, until there is room for `more_count` beside
/// those that are open now. ErrorCode::invalid_argument: the hard limit is too low; the message says what to do.
Status make_room_for_descriptors(std::size_t more_count);

}  // namespace poseidon
