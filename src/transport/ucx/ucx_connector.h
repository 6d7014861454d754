// UcxConnector: one connect() of the UCX transport, from the first try to the last.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/admission.h"
#include "transport/connect_attempts.h"
#include "transport/tcp/address.h"
#include "transport/transport.h"
#include "transport/ucx/engine.h"

namespace poseidon::ucx {

class UcxFlow;

/// The current attempt or timer keeps it alive. After construction only the loop thread uses it.
class UcxConnector final : public std::enable_shared_from_this<UcxConnector> {
 public:
  /// `candidates` must not be empty.
  UcxConnector(Loop& loop, std::string address, std::vector<tcp::SocketAddress> candidates, Admission admission,
               Clock::time_point deadline, OnConnect done);

  /// Tries every candidate in turn, again and again until the deadline. Calls `done` once.
  void start(const std::shared_ptr<Engine>& engine);

 private:
  void try_candidate();
  void on_open(const Status& status);
  void failed(const Status& why);

  Loop& loop_;
  const std::string address_;
  const std::vector<tcp::SocketAddress> candidates_;
  const Admission admission_;
  const OnConnect done_;
  std::weak_ptr<Engine> engine_;
  ConnectAttempts attempts_;
  std::shared_ptr<UcxFlow> flow_;  // the flow of the current attempt
  Loop::TimerId timer_ = 0;
};

}  // namespace poseidon::ucx
