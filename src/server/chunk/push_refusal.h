// Why a server refuses a push, in words.
#pragma once

#include <cstddef>
#include <string>

#include "poseidon/status.h"
#include "wire/header.h"

namespace poseidon {

inline Status refused_push(const wire::Header& header, const std::string& why) {
  return {ErrorCode::refused, "the server refuses the push of rank " + std::to_string(header.rank) + " in step " +
                                  std::to_string(header.step) + ": " + why};
}

/// `size_bytes`: of the dense array that it stands for.
inline Status refused_size(const wire::Header& header, std::size_t size_bytes, std::size_t others_bytes) {
  return refused_push(header, "it has " + std::to_string(size_bytes) + " bytes, others have " +
                                  std::to_string(others_bytes) + "; the ranks' models differ");
}

}  // namespace poseidon
