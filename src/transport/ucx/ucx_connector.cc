#ifdef POSEIDON_HAVE_UCX

#include "transport/ucx/ucx_connector.h"

#include <utility>

#include "transport/ucx/ucx_flow.h"

namespace poseidon::ucx {

namespace {

// As with TCP, a new attempt finds a host that was not up yet sooner than the kernel's next packet does.
constexpr std::chrono::seconds kAttemptTime{3};

}  // namespace

UcxConnector::UcxConnector(Loop& loop, std::string address, std::vector<tcp::SocketAddress> candidates,
                           Admission admission, Clock::time_point deadline, OnConnect done)
    : loop_(loop),
      address_(std::move(address)),
      candidates_(std::move(candidates)),
      admission_(std::move(admission)),
      done_(std::move(done)),
      attempts_(candidates_.size(), deadline) {}

void UcxConnector::start(const std::shared_ptr<Engine>& engine) {
  loop_.check_thread();
  engine_ = engine;
  try_candidate();
}

void UcxConnector::try_candidate() {
  const auto engine = engine_.lock();
  if (engine == nullptr) return;  // the loop ends
  const auto self = shared_from_this();
  const tcp::SocketAddress& candidate = candidates_[attempts_.candidate()];
  timer_ = loop_.call_at(attempts_.limit(kAttemptTime), [self] { self->failed({ErrorCode::timeout, "no answer"}); });
  flow_ = UcxFlow::connect(*engine, tcp::to_text(candidate), candidate, admission_.credentials,
                           [self](const Status& status) { self->on_open(status); });
}

void UcxConnector::on_open(const Status& status) {
  const auto handshake = flow_->handshake_state();
  const bool hopeless = handshake == wire::Handshake::State::unproven || handshake == wire::Handshake::State::foreign;
  if (!status.ok() && !hopeless) return failed(status);
  loop_.cancel(timer_);
  const auto flow = std::exchange(flow_, nullptr);
  if (hopeless) return done_(wire::handshake_error(handshake, address_));
  done_(std::shared_ptr<Flow>(flow));
}

void UcxConnector::failed(const Status& why) {
  const auto self = shared_from_this();
  loop_.cancel(timer_);
  if (const auto flow = std::exchange(flow_, nullptr)) flow->close(std::chrono::milliseconds(0));
  const auto next = attempts_.next();
  if (!next) return done_(Status(ErrorCode::unreachable, "cannot connect to " + address_ + ": " + why.message()));
  timer_ = loop_.call_at(*next, [self] { self->try_candidate(); });
}

}  // namespace poseidon::ucx

#endif  // POSEIDON_HAVE_UCX
