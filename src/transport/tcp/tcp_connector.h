// TcpConnector: one connect() of the TCP transport, from the first try to the last.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/file_descriptor.h"
#include "transport/admission.h"
#include "transport/connect_attempts.h"
#include "transport/connection_handshake.h"
#include "transport/tcp/address.h"
#include "transport/transport.h"

namespace poseidon::tcp {

/// What it has registered with the loop keeps it alive. After construction only the loop thread uses it.
class TcpConnector final : public std::enable_shared_from_this<TcpConnector> {
 public:
  /// `candidates` must not be empty.
  TcpConnector(Loop& loop, std::string address, std::vector<SocketAddress> candidates, Admission admission,
               Clock::time_point deadline, OnConnect done);

  /// Tries every candidate in turn, again and again until the deadline. Calls `done` once.
  void start();

 private:
  void try_candidate();
  void on_ready();
  void shake_hands();
  void finish(Result<std::shared_ptr<Flow>> result);
  void failed(std::string why);
  void stop_attempt();

  Loop& loop_;
  const std::string address_;
  const std::vector<SocketAddress> candidates_;
  const Admission admission_;
  const Clock::time_point started_;
  const OnConnect done_;
  ConnectAttempts attempts_;
  std::string handshake_failure_;  // the error of the last handshake that failed
  // State of the current attempt:
  FileDescriptor socket_;
  std::optional<ConnectionHandshake> handshake_;  // present once the socket is connected
  Loop::TimerId timer_ = 0;
};

}  // namespace poseidon::tcp
