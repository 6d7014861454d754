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

/// A key may be set again; the last value counts. One thread at a time may call it (TcpStore checks it, in builds
/// with checks). Under torchrun the agent's store implements it; otherwise rank 0 serves a TcpStore.
class Store {
 public:
  virtual ~Store() = default;
  /// Sets the key's value.
  virtual Status set(const std::string& key, const std::string& value) = 0;
  /// Returns the key's value, and waits for it up to `timeout`. ErrorCode::timeout: the key was not set. With a timeout
  /// of 0 it does not wait.
  virtual Result<std::string> get(const std::string& key, std::chrono::milliseconds timeout) = 0;
};

/// Opens the store at options.master_addr:master_port, which rank 0 serves. It is for all generations of the job: pass
/// it to Client::connect each time. Blocks up to options.timeout; for `keep_waiting` see Client::connect.
/// ErrorCode::unreachable names the address and says what to check.
Result<std::shared_ptr<Store>> open_store(const Options& options, const std::function<bool()>& keep_waiting);

/// The highest generation of the job that some process has asked for. It is 0 before the first, and if the store cannot
/// say. If it differs from Client::generation(), a process waits to join, and all members must end their clients and
/// connect again. (A lower number means that the store is new and a process has begun again.) Does not wait. Call it on
/// the thread of the store's other calls.
///
/// It also answers processes that nobody knows and that ask to take part: one in a slot that no member has gets in.
std::uint32_t generation_wanted(Store& store, const std::string& job);

/// Notes that the process in `slot` leaves this generation for good, so that nobody waits for it in the next one. It
/// does not report whether the store took it.
void note_left(Store& store, const std::string& job, std::uint32_t generation, int slot);

/// The last process that was refused because it is of another job or run, and why; empty if there is none. Does not
/// wait. Call it on the thread of the store's other calls.
std::string last_refused(Store& store, const std::string& job);

}  // namespace poseidon
