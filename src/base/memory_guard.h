// A loop that finds no memory fails the operation that it works on, and not the process.
#pragma once

#include <new>

#include "poseidon/status.h"

namespace poseidon {

/// Calls `work`, which returns a Status or a Result, and returns its result. ErrorCode::refused: the machine has not
/// enough memory. `what` is called then; it names what took too much: "the payload of 12345 bytes from rank 3". The
/// caller has to clean up what `work` left half done.
template <typename Work, typename What>
auto guard_memory(const Work& work, const What& what) -> decltype(work()) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    return Status(ErrorCode::refused, "there is no memory left for " + what() +
                                          "; take smaller batches or layers, more hosts, or raise the limits of "
                                          "this process (ulimit -v, its container)");
  }
}

}  // namespace poseidon
