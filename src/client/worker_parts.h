// WorkerParts: what a worker has besides its client.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "poseidon/client.h"

namespace poseidon {

/// The parts of a worker that its client needs and does not know: the transports below its connections, the store and
/// the embedded server, if there is one. The client owns them and destroys them after its connections. It asks them
/// where its own answer is not the worker's whole answer. Any thread may call the const methods.
class WorkerParts {
 public:
  WorkerParts() = default;
  virtual ~WorkerParts() = default;
  WorkerParts(const WorkerParts&) = delete;
  WorkerParts& operator=(const WorkerParts&) = delete;

  /// As Client::notices.
  virtual std::vector<std::string> notices() const = 0;
  /// The ranks that came late to the embedded server, in order.
  virtual std::vector<LateRank> late_ranks() const = 0;
  /// The bytes that the embedded server has sent and received over the network.
  virtual std::pair<std::uint64_t, std::uint64_t> server_traffic() const = 0;
  /// Ends the parts after the client's connections have been closed. `failed`: the job has failed, so that no other
  /// worker waits for results of the embedded server. The client calls this once.
  virtual void shutdown(bool failed) = 0;
};

}  // namespace poseidon
