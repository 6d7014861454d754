// Transports whose bytes other loops move, as cases of the suites.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "conformance/tls_cases.h"
#include "conformance/transport_fixture.h"
#include "transport/inproc/inproc_transport.h"
#include "transport/spread/spread_transport.h"
#include "transport/tcp/tcp_transport.h"

namespace poseidon::testing {

/// A spread transport that owns what is beneath.
class OwnSpreadTransport final : public Transport {
 public:
  explicit OwnSpreadTransport(std::unique_ptr<Transport> beneath)
      : beneath_(std::move(beneath)), spread_(make_spread_transport(*beneath_, 2)) {}
  Result<std::unique_ptr<Listener>> listen(Loop& loop, const std::string& address,
                                           std::function<void(std::shared_ptr<Flow>)> on_accept) override {
    return spread_->listen(loop, address, std::move(on_accept));
  }
  void connect(Loop& loop, const std::string& address, Clock::time_point deadline,
               std::function<void(Result<std::shared_ptr<Flow>>)> done) override {
    spread_->connect(loop, address, deadline, std::move(done));
  }

 private:
  const std::unique_ptr<Transport> beneath_;
  const std::unique_ptr<Transport> spread_;
};

inline std::unique_ptr<Transport> make_spread_tcp() {
  return std::make_unique<OwnSpreadTransport>(make_tcp_transport());
}
inline std::unique_ptr<Transport> make_spread_inproc() {
  return std::make_unique<OwnSpreadTransport>(make_inproc_transport());
}
inline std::unique_ptr<Transport> make_spread_tls() {
  return std::make_unique<OwnSpreadTransport>(make_tcp_with_new_keys());
}

/// `with_levels`: urgent messages overtake others, as they do not inside a process.
inline std::vector<TransportCase> spread_cases(bool with_levels) {
  std::vector<TransportCase> cases{{"spread", make_spread_tcp, own_loopback(), true, false},
                                   {"spread_one_loop", make_spread_tcp, own_loopback(), true, true}};
  if (!with_levels) cases.push_back({"spread_inproc", make_spread_inproc, "shard:0", false, false});
  if (tls_available()) cases.push_back({"spread_tls", make_spread_tls, own_loopback(), true, false});
  return cases;
}

}  // namespace poseidon::testing
