// WorkerParts: the parts of a worker besides its client.
#pragma once

#include <string>
#include <vector>

#include "base/pinned.h"
#include "poseidon/client.h"

namespace poseidon {

/// These are the transports below the client's connections, the store and the embedded server, if there is one. The
/// client owns them through this interface, and destroys them after its connections. It asks them for what they add to
/// its own answers. Any thread may call the const methods.
class WorkerParts : private Pinned {
 public:
  virtual ~WorkerParts() = default;

  /// See Client::notices.
  virtual std::vector<std::string> notices() const = 0;
  /// The ranks that were late at the embedded server, in order of rank.
  virtual std::vector<LateRank> late_ranks() const = 0;
  /// The bytes that the embedded server has sent and received over the network.
  virtual TrafficStats server_traffic() const = 0;
  /// Returns when no other worker may ask the embedded server for values any more, or `keep_serving` returns false.
  virtual void serve_on(const std::function<bool()>& keep_serving) = 0;
  /// Ends the parts after the client's connections have been closed. `failed`: the job has failed, so that no other
  /// worker waits for results of the embedded server. The client calls this once.
  virtual void shutdown(bool failed) = 0;
};

}  // namespace poseidon
