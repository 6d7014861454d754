// UcxListener: a bound address that hands out flows.
#pragma once

#include <memory>
#include <string>

#include "transport/admission.h"
#include "transport/transport.h"
#include "transport/ucx/engine.h"

namespace poseidon::ucx {

class UcxListener final : public Listener {
 public:
  /// See Transport::listen. `engine` is the one of the loop, whose thread alone calls this. Any other
  /// thread may destroy the listener.
  static Result<std::unique_ptr<Listener>> listen(const std::shared_ptr<Engine>& engine, const std::string& address,
                                                  const Admission& admission, OnAccept on_accept);

  ~UcxListener() override;
  const std::string& address() const override { return address_; }

 private:
  class Acceptor;
  UcxListener(Loop& loop, std::shared_ptr<Acceptor> acceptor, std::string address);

  Loop& loop_;
  std::shared_ptr<Acceptor> acceptor_;
  const std::string address_;
};

}  // namespace poseidon::ucx
