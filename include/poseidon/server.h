// Server: one parameter server, as a process of its own (`poseidon server`). Workers start embedded servers themselves.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "poseidon/options.h"
#include "poseidon/status.h"

namespace poseidon {

/// A running parameter server. It stops when it is destroyed. Any thread may call its methods.
class Server {
 public:
  /// Listens on `options.interfaces` and serves until shutdown. Its first core listens on `port` (0: any), each further
  /// core on the next port. Without interfaces it listens on loopback; "0.0.0.0" means all addresses of the host. It
  /// accepts jobs of every secret in `options.secret`. ErrorCode::unreachable: an address cannot be bound.
  static Result<std::unique_ptr<Server>> listen(const Options& options, std::uint16_t port);
  virtual ~Server() = default;

  /// "host:port" that workers connect to.
  virtual std::string address() const = 0;
  /// Messages about what does not work although the server goes on, the oldest first: checkpoints that could not be
  /// written or used. Any thread.
  virtual std::vector<std::string> notices() const = 0;
  virtual void shutdown() = 0;
};

}  // namespace poseidon
