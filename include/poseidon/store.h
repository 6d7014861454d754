// Store: the small key-value service through which ranks find each other.
#pragma once

#include <chrono>
#include <string>

#include "poseidon/status.h"

namespace poseidon {

/// Keys are set once. Called from one thread at a time; may block up to the given timeout.
/// Under torchrun the agent's store stands behind this; otherwise rank 0 serves a TcpStore.
class Store {
 public:
  virtual ~Store() = default;
  virtual Status set(const std::string& key, const std::string& value) = 0;
  /// Waits until the key is there. ErrorCode::timeout when it does not come.
  virtual Result<std::string> get(const std::string& key, std::chrono::milliseconds timeout) = 0;
};

}  // namespace poseidon
