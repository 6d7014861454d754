// ShmConnector: one connect() of the shared-memory transport, from the first try to the last.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "transport/admission.h"
#include "transport/connect_attempts.h"
#include "transport/shm/local_socket.h"
#include "transport/transport.h"

namespace poseidon::shm {

/// What it has registered with the loop keeps it alive. After construction only the loop thread uses it.
class ShmConnector final : public std::enable_shared_from_this<ShmConnector> {
 public:
  ShmConnector(Loop& loop, std::string address, const SocketName& name, Admission admission, Clock::time_point deadline,
               OnConnect done);

  /// Tries again and again until the deadline. Calls `done` once.
  void attempt();

 private:
  Status begin();
  void shake_hands();
  Result<std::shared_ptr<Flow>> share_memory();
  void finish(Result<std::shared_ptr<Flow>> result);
  void failed(const Status& why);
  void stop_attempt();

  Loop& loop_;
  const std::string address_;
  const SocketName name_;
  const Admission admission_;
  const OnConnect done_;
  ConnectAttempts attempts_;
  // State of the current attempt:
  FileDescriptor socket_;
  std::optional<wire::Handshake> handshake_;
  Loop::TimerId timer_ = 0;
};

}  // namespace poseidon::shm
