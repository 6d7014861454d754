#include "client/lobby.h"

#include <utility>

namespace poseidon {

namespace {
// A peer has one connection for each priority class. It connects only after it has read that all workers are present.
constexpr std::size_t kMostWaiting = 4096;
}  // namespace

Result<std::string> Lobby::listen(Transport& transport, const std::string& address) {
  loop_->check_other_thread();
  auto listener = transport.listen(*loop_, address, [this](std::shared_ptr<Flow> flow) { arrive(std::move(flow)); });
  if (!listener.ok()) return listener.status();
  listeners_.push_back(std::move(listener.value()));
  return listeners_.back()->address();
}

void Lobby::open(std::function<void(std::shared_ptr<Flow>)> on_flow) {
  loop_->check_thread();
  on_flow_ = std::move(on_flow);
  for (auto& flow : std::exchange(waiting_, {})) on_flow_(std::move(flow));
}

void Lobby::close() {
  if (listeners_.empty()) return;
  loop_->check_other_thread();
  listeners_.clear();
  loop_->call([this] { waiting_.clear(); });
}

void Lobby::arrive(std::shared_ptr<Flow> flow) {
  loop_->check_thread();
  if (on_flow_) return on_flow_(std::move(flow));
  if (waiting_.size() < kMostWaiting) waiting_.push_back(std::move(flow));
}

}  // namespace poseidon
