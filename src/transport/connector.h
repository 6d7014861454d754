// Connector: one connect() of a transport, from the first try to the last.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "base/file_descriptor.h"
#include "transport/connect_attempts.h"
#include "transport/connection_handshake.h"
#include "transport/transport.h"

namespace poseidon {

/// The current attempt, or the timer of the next one, keeps it alive. After construction only the loop thread uses it.
class Connector : public std::enable_shared_from_this<Connector> {
 public:
  virtual ~Connector() = default;

  /// Tries every candidate in turn, again and again until the deadline. Calls `done` once.
  virtual void attempt() = 0;

 protected:
  /// `candidate_count` must be above 0.
  Connector(Loop& loop, std::string address, std::size_t candidate_count, Clock::time_point deadline, OnConnect done);

  /// The attempt fails, saying `why`, if it is not over after this time.
  void limit_attempt(Clock::duration longest, const std::string& why);
  /// The attempt is over. The next one comes in time; after the last one `done` is told.
  void failed(std::string why);
  /// The attempt is over, and there is no other one.
  void finish(Result<std::shared_ptr<Flow>> result);

  Loop& loop_;
  const std::string address_;
  ConnectAttempts attempts_;
  std::string handshake_failure_;  // the error of the last handshake that failed

 private:
  /// Drops what the attempt has made.
  virtual void drop_attempt() {}
  void end_attempt();

  const Clock::time_point started_ = Clock::now();
  const OnConnect done_;
  Loop::TimerId timer_ = 0;  // ends the attempt, or begins the next one
};

/// A connector each of whose attempts is a socket, at whose other end somebody must know the secret.
class SocketConnector : public Connector {
 protected:
  SocketConnector(Loop& loop, std::string address, std::size_t candidate_count, Admission admission,
                  Clock::time_point deadline, OnConnect done);

  /// The socket is connected. Call shake_hands() then, and whenever it is readable.
  void begin_handshake();
  void shake_hands();

  const Admission admission_;
  FileDescriptor socket_;
  std::optional<ConnectionHandshake> handshake_;  // present once the socket is connected

 private:
  /// Gives the socket to a new flow. If that fails, so does the attempt.
  virtual Result<std::shared_ptr<Flow>> make_flow() = 0;
  void drop_attempt() final;
};

}  // namespace poseidon
