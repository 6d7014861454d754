// The texts with which a server refuses a push.
#pragma once

#include <cstddef>
#include <string>

#include "poseidon/status.h"
#include "wire/messages/contribution.h"

namespace poseidon {

inline Status refused_push(const wire::Contribution& push, const std::string& why) {
  return {ErrorCode::refused, "the server refuses the push of rank " + std::to_string(push.rank) + " in step " +
                                  std::to_string(push.step) + ": " + why};
}

/// `size_bytes` is the size of the dense array for which the push stands.
inline Status refused_size(const wire::Contribution& push, std::size_t size_bytes, std::size_t others_bytes) {
  return refused_push(push, "it has " + std::to_string(size_bytes) + " bytes, others have " +
                                std::to_string(others_bytes) + "; build the same model on all ranks");
}

}  // namespace poseidon
