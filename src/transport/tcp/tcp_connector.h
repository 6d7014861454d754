// TcpConnector: one connect() of the TCP transport, from the first try to the last.
#pragma once

#include <string>
#include <vector>

#include "transport/connector.h"
#include "transport/tcp/address.h"

namespace poseidon::tcp {

class TcpConnector final : public SocketConnector {
 public:
  /// `candidates` must not be empty.
  TcpConnector(Loop& loop, std::string address, std::vector<SocketAddress> candidates, Admission admission,
               Clock::time_point deadline, OnConnect done);
  void attempt() override;

 private:
  void on_ready();
  Result<std::shared_ptr<Flow>> make_flow() override;

  const std::vector<SocketAddress> candidates_;
};

}  // namespace poseidon::tcp
