#ifdef POSEIDON_HAVE_UCX

#include "transport/ucx/ucx_connector.h"

#include <algorithm>
#include <utility>

#include "transport/ucx/ucx_flow.h"

namespace poseidon::ucx {

namespace {

// As with TCP: a fresh attempt finds a host that was not up yet sooner than the kernel's next packet.
constexpr std::chrono::seconds kAttemptTime{3};

}  // namespace

UcxConnector::UcxConnector(Loop& loop, std::string address, std::vector<tcp::SocketAddress> candidates,
                           Admission admission, Clock::time_point deadline, Done done)
    : loop_(loop),
      address_(std::move(address)),
      candidates_(std::move(candidates)),
      admission_(std::move(admission)),
      deadline_(deadline),
      done_(std::move(done)) {}

void UcxConnector::start(const std::shared_ptr<Worker>& worker) {
  worker_ = worker;
  try_candidate();
}

void UcxConnector::try_candidate() {
  const auto worker = worker_.lock();
  if (worker == nullptr) return;  // the loop ends
  const auto self = shared_from_this();
  const tcp::SocketAddress& candidate = candidates_[next_candidate_];
  timer_ = loop_.call_at(std::min(deadline_, Clock::now() + kAttemptTime), [self] {
    self->failed({ErrorCode::timeout, "no answer"});
  });
  flow_ = UcxFlow::connect(*worker, tcp::to_text(candidate), candidate, admission_.credentials,
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
  next_candidate_ = (next_candidate_ + 1) % candidates_.size();
  const auto now = Clock::now();
  if (now >= deadline_) {
    return done_(Status(ErrorCode::unreachable, "cannot connect to " + address_ + ": " + why.message()));
  }
  // A candidate's turn comes at once; a round of all of them only after a pause.
  const auto pause = next_candidate_ == 0 ? backoff_.next() : std::chrono::milliseconds(0);
  timer_ = loop_.call_at(std::min(deadline_, now + pause), [self] { self->try_candidate(); });
}

}  // namespace poseidon::ucx

#endif  // POSEIDON_HAVE_UCX
