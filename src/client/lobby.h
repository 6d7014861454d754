// Lobby: where connections from peers come in and wait until the client knows who its peers are.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace poseidon {

/// A worker has to listen before it meets the others, who then may come before it has read who they are.
class Lobby {
 public:
  explicit Lobby(std::shared_ptr<Loop> loop) : loop_(std::move(loop)) {}
  ~Lobby() { close(); }
  Lobby(const Lobby&) = delete;
  Lobby& operator=(const Lobby&) = delete;

  /// Starts accepting there, too; returns the address to publish. `transport` must outlive this. Not the loop's thread.
  Result<std::string> listen(Transport& transport, const std::string& address);

  /// Passes on those who wait and, from here on, everybody who comes. The loop's thread.
  void open(std::function<void(std::shared_ptr<Flow>)> on_flow);

  /// Accepts no more and drops those who still wait. Again: nothing. Not the loop's thread, while the loop runs.
  void close();

 private:
  void arrive(std::shared_ptr<Flow> flow);

  const std::shared_ptr<Loop> loop_;
  std::vector<std::unique_ptr<Listener>> listeners_;  // the owner's thread
  // The loop's thread.
  std::vector<std::shared_ptr<Flow>> waiting_;
  std::function<void(std::shared_ptr<Flow>)> on_flow_;  // empty until open()
};

}  // namespace poseidon
