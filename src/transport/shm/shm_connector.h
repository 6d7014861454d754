// ShmConnector: one connect() of the shared-memory transport, from the first try to the last.
#pragma once

#include <string>

#include "transport/connector.h"
#include "transport/shm/local_socket.h"

namespace poseidon::shm {

class ShmConnector final : public SocketConnector {
 public:
  /// `admission` has no TLS.
  ShmConnector(Loop& loop, std::string address, const SocketName& name, Admission admission, Clock::time_point deadline,
               OnConnect done);
  void attempt() override;

 private:
  Status begin();
  Result<std::shared_ptr<Flow>> make_flow() override;

  const SocketName name_;
};

}  // namespace poseidon::shm
