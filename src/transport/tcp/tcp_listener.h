// TcpListener: a bound socket that hands out flows.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "base/file_descriptor.h"
#include "transport/entrance.h"
#include "transport/transport.h"

namespace poseidon::tcp {

class TcpListener final : public Listener {
 public:
  /// See Transport::listen.
  static Result<std::unique_ptr<Listener>> listen(Loop& loop, const std::string& address, const Admission& admission,
                                                  OnAccept on_accept);

  TcpListener(Loop& loop, FileDescriptor socket, const Admission& admission, OnAccept on_accept);
  ~TcpListener() override;
  const std::string& address() const override { return address_; }

 private:
  void enter(FileDescriptor socket, ConnectionHandshake& handshake);

  Loop& loop_;
  const std::string address_;
  const OnAccept on_accept_;
  const std::chrono::milliseconds silence_;
  const CodingPolicy coding_;
  std::unique_ptr<Entrance> entrance_;
};

}  // namespace poseidon::tcp
