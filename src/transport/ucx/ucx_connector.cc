#ifdef POSEIDON_HAVE_UCX

#include "transport/ucx/ucx_connector.h"

#include <utility>

#include "transport/ucx/ucx_flow.h"

namespace poseidon::ucx {

namespace {

// As with TCP, a new attempt finds a host that was not up yet sooner than the kernel's next packet does.
constexpr std::chrono::seconds kAttemptTime{3};

}  // namespace

UcxConnector::UcxConnector(const std::shared_ptr<Engine>& engine, Loop& loop, std::string address,
                           std::vector<tcp::SocketAddress> candidates, wire::Credentials credentials,
                           Clock::time_point deadline, OnConnect done)
    : Connector(loop, std::move(address), candidates.size(), deadline, std::move(done)),
      engine_(engine),
      candidates_(std::move(candidates)),
      credentials_(std::move(credentials)) {}

void UcxConnector::attempt() {
  loop_.check_thread();
  const auto engine = engine_.lock();
  if (engine == nullptr) return;  // the loop ends
  const tcp::SocketAddress& candidate = candidates_[attempts_.candidate()];
  limit_attempt(kAttemptTime, "no answer");
  flow_ = UcxFlow::connect(*engine, tcp::to_text(candidate), candidate, credentials_,
                           [self = shared_from_this(), this](const Status& status) { on_open(status); });
}

void UcxConnector::on_open(const Status& status) {
  const auto handshake = flow_->handshake_state();
  const bool hopeless = handshake == wire::Handshake::State::unproven || handshake == wire::Handshake::State::foreign;
  if (!status.ok() && !hopeless) return failed(status.message());
  const auto flow = std::exchange(flow_, nullptr);
  if (hopeless) return finish(wire::handshake_error(handshake, address_));
  finish(std::shared_ptr<Flow>(flow));
}

void UcxConnector::drop_attempt() {
  if (const auto flow = std::exchange(flow_, nullptr)) flow->close(std::chrono::milliseconds(0));
}

}  // namespace poseidon::ucx

#endif  // POSEIDON_HAVE_UCX
