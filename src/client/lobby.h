// Lobby: accepts connections from peers, and keeps them until the client knows who its peers are.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/pinned.h"
#include "transport/transport.h"

namespace poseidon {

/// A worker has to listen before it meets the others. So a peer may connect before the worker knows its peers.
class Lobby : private Pinned {
 public:
  explicit Lobby(std::shared_ptr<Loop> loop) : loop_(std::move(loop)) {}
  ~Lobby() { close(); }

  /// Starts to accept connections at one more address. Returns the address to publish. `transport` must outlive this
  /// object. The loop's thread must not call it.
  Result<std::string> listen(Transport& transport, const std::string& address);

  /// Passes on the connections that wait and, from now on, every new one. Only the loop's thread calls it.
  void open(std::function<void(std::shared_ptr<Flow>)> on_flow);

  /// Stops accepting and drops the connections that still wait. Further calls have no effect. While the loop runs, its
  /// thread must not call it.
  void close();

 private:
  void arrive(std::shared_ptr<Flow> flow);

  const std::shared_ptr<Loop> loop_;
  std::vector<std::unique_ptr<Listener>> listeners_;  // only the owner's thread uses them
  // Only the loop's thread uses the following.
  std::vector<std::shared_ptr<Flow>> waiting_;
  std::function<void(std::shared_ptr<Flow>)> on_flow_;  // empty until open()
};

}  // namespace poseidon
