#include "transport/tcp/tcp_transport.h"

#include <utility>

#include "transport/tcp/address.h"
#include "transport/tcp/tcp_connector.h"
#include "transport/tcp/tcp_listener.h"

namespace poseidon {

namespace {

class TcpTransport final : public Transport {
 public:
  explicit TcpTransport(Admission admission) : admission_(std::move(admission)) {}

  Result<std::unique_ptr<Listener>> listen(Loop& loop, const std::string& address, OnAccept on_accept) override {
    return tcp::TcpListener::listen(loop, address, admission_, std::move(on_accept));
  }

  void connect(Loop& loop, const std::string& address, Clock::time_point deadline, OnConnect done) override {
    // The look-up is done here, because a slow name server must not block the loop.
    auto candidates = tcp::resolve(address);
    if (!candidates.ok()) return cannot_connect(loop, std::move(done), candidates.status());
    auto connector = std::make_shared<tcp::TcpConnector>(loop, address, std::move(candidates.value()), admission_,
                                                         deadline, std::move(done));
    loop.post([connector] { connector->attempt(); });
  }

 private:
  const Admission admission_;
};

}  // namespace

std::unique_ptr<Transport> make_tcp_transport(const Admission& admission) {
  return std::make_unique<TcpTransport>(admission);
}

}  // namespace poseidon
