// The texts with which a server refuses a push.
#pragma once

#include <cstddef>
#include <string>

#include "poseidon/status.h"
#include "wire/messages/contribution.h"

namespace poseidon {

inline Status refused_push(const wire::Contribution& push, const std::string& why) {
  return {ErrorCode::refused,
          concat("the server refuses the push of rank ", push.rank, " in step ", push.step, ": ", why)};
}

/// `size_bytes` is the size of the dense array for which the push stands.
inline Status refused_size(const wire::Contribution& push, std::size_t size_bytes, std::size_t others_bytes) {
  return refused_push(
      push, concat("it has ", size_bytes, " bytes, others have ", others_bytes, "; build the same model on all ranks"));
}

}  // namespace poseidon
