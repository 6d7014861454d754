// TcpListener: a bound socket that hands out flows.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/file_descriptor.h"
#include "transport/transport.h"

namespace poseidon::tcp {

class TcpListener final : public Listener {
 public:
  using OnAccept = std::function<void(std::shared_ptr<Flow>)>;

  /// Transport::listen.
  static Result<std::unique_ptr<Listener>> listen(Loop& loop, const std::string& address, OnAccept on_accept);

  TcpListener(Loop& loop, FileDescriptor socket, OnAccept on_accept);
  ~TcpListener() override;
  const std::string& address() const override { return address_; }

 private:
  Status start();
  void accept_all();
  void pause();

  Loop& loop_;
  const FileDescriptor socket_;
  const std::string address_;
  const OnAccept on_accept_;
  Loop::TimerId resume_timer_ = 0;
};

}  // namespace poseidon::tcp
