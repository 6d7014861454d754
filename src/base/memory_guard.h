// A loop that finds no memory fails what it works on, not the process.
#pragma once

#include <new>
#include <string>

#include "poseidon/status.h"

namespace poseidon {

/// What `work`, which returns a Status or a Result, comes to; ErrorCode::refused where the machine has no memory for
/// it. `what` is called then, and names what took too much: "the payload of 12345 bytes from rank 3". What `work` left
/// half done has to be ended by the caller.
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
