// ShmConnector: one connect() of the shared-memory transport, from the first try to the last.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "transport/backoff.h"
#include "transport/shm/local_socket.h"
#include "transport/transport.h"

namespace poseidon::shm {

/// Kept alive by its timer. Loop thread only after construction.
class ShmConnector final : public std::enable_shared_from_this<ShmConnector> {
 public:
  using Done = std::function<void(Result<std::shared_ptr<Flow>>)>;

  ShmConnector(Loop& loop, std::string address, const SocketName& name, Clock::time_point deadline, Done done);

  /// Tries again and again until the deadline; calls `done` once.
  void attempt();

 private:
  Result<std::shared_ptr<Flow>> try_once();

  Loop& loop_;
  const std::string address_;
  const SocketName name_;
  const Clock::time_point deadline_;
  const Done done_;
  Backoff backoff_;
};

}  // namespace poseidon::shm
