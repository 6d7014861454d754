// UcxConnector: one connect() of the UCX transport, from the first try to the last.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/connector.h"
#include "transport/tcp/address.h"
#include "transport/ucx/engine.h"

namespace poseidon::ucx {

class UcxFlow;

class UcxConnector final : public Connector {
 public:
  /// `engine` is that of the loop. `candidates` must not be empty.
  UcxConnector(const std::shared_ptr<Engine>& engine, Loop& loop, std::string address,
               std::vector<tcp::SocketAddress> candidates, wire::Credentials credentials, Clock::time_point deadline,
               OnConnect done);
  void attempt() override;

 private:
  void on_open(const Status& status);
  void drop_attempt() override;

  const std::weak_ptr<Engine> engine_;
  const std::vector<tcp::SocketAddress> candidates_;
  const wire::Credentials credentials_;
  std::shared_ptr<UcxFlow> flow_;  // the flow of the current attempt
};

}  // namespace poseidon::ucx
