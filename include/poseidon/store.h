// Store: the small key-value service through which ranks find each other.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "poseidon/options.h"
#include "poseidon/status.h"

namespace poseidon {

/// Keys may be set again; then the last value counts. Called from one thread at a time; may block up to the given
/// timeout. Under torchrun the agent's store stands behind this; otherwise rank 0 serves a TcpStore.
class Store {
 public:
  virtual ~Store() = default;
  /// Sets the key's value.
  virtual Status set(const std::string& key, const std::string& value) = 0;
  /// Waits until the key is there. ErrorCode::timeout when it does not come. A timeout of 0 is a quick look.
  virtual Result<std::string> get(const std::string& key, std::chrono::milliseconds timeout) = 0;
};

/// The store of options.master_addr:master_port, which rank 0 serves, for all generations of a job that this process
/// is part of: hand it to Client::connect each time. Blocks up to options.timeout; `keep_waiting` as there.
/// ErrorCode::unreachable names the address and what to check.
Result<std::shared_ptr<Store>> open_store(const Options& options, const std::function<bool()>& keep_waiting);

/// The highest generation of the job that some process has asked for; 0 before the first, or where the store cannot
/// say. Another one than Client::generation(): somebody waits to join (a lower one: the store is new, and somebody has
/// begun again), and those who are in that client must end it and connect again. A quick look; the same thread as the
/// store's other calls.
std::uint32_t generation_wanted(Store& store, const std::string& job);

}  // namespace poseidon
