// Server: one shard host of the parameter server, embedded in a worker or standing alone.
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
  /// Listens on `options.interfaces` and serves until shutdown: its first core on `port` (0: any), each
  /// further one on the next port. Without interfaces it listens on loopback; "0.0.0.0" asks for all of the host's.
  /// It takes jobs of every secret in `options.secret`.
  static Result<std::unique_ptr<Server>> listen(const Options& options, std::uint16_t port);
  virtual ~Server() = default;

  /// "host:port" that workers connect to.
  virtual std::string address() const = 0;
  /// What it goes on without, in words, the oldest first: checkpoints that could not be written or used. Any thread.
  virtual std::vector<std::string> notices() const = 0;
  virtual void shutdown() = 0;
};

}  // namespace poseidon
