#include "transport/flow_end.h"

#include <utility>

#include "base/invariant.h"

namespace poseidon {

Status check_send(const Status& send_error, bool open, const std::string& peer_name, wire::Header& header,
                  std::span<const std::span<const std::byte>> payload) {
  if (header.coding == Coding::none) {
    header.payload_bytes = 0;
    for (const auto& piece : payload) header.payload_bytes += piece.size();
  }
  if (!send_error.ok()) return send_error;
  if (!open) return {ErrorCode::shut_down, "connection to " + peer_name + " is closed"};
  if (header.payload_bytes > wire::kMaxPayloadBytes) {
    return {ErrorCode::invalid_argument, concat("a payload of ", header.payload_bytes,
                                                " bytes is too large; divide the layer, or lower chunk_bytes")};
  }
  return {};
}

Status check_place(const Result<std::span<std::byte>>& place, const wire::Header& header) {
  if (!place.ok() || place.value().size() == header.payload_bytes) return place.status();
  return {ErrorCode::invalid_argument,
          concat("the receiver gave ", place.value().size(), " bytes for a payload of ", header.payload_bytes)};
}

bool FlowEnd::may_send(const Status& send_error, bool open, wire::Header& header, const Pieces& payload, Done& done) {
  const Status refusal = check_send(send_error, open, peer_name_, header, payload);
  if (!refusal.ok()) finish(std::move(done), refusal);
  return refusal.ok();
}

void FlowEnd::linger(std::chrono::milliseconds time, std::function<void()> when_over) {
  linger_timer_ = loop_.call_at(Clock::now() + time, std::move(when_over));
}

Status FlowEnd::lost(const std::string& why) const {
  return {ErrorCode::peer_lost, "connection to " + peer_name_ + " ended (" + why + ")"};
}

void FlowEnd::end(const Status& status, bool ours) {
  one_thread_.check();
  invariant(!ended_, "a flow ends once");
  ended_ = true;
  loop_.cancel(linger_timer_);
  status_ = ours ? Status() : status;
  if (!send_error_.ok()) return;
  send_error_ =
      ours ? Status(ErrorCode::shut_down, "connection to " + peer_name_ + " was closed before this was sent") : status;
}

void FlowEnd::run_finished() {
  one_thread_.check();
  for (const auto& [done, status] : std::exchange(finished_, {})) done(status);
}

void FlowEnd::post(std::shared_ptr<Flow> flow, Receiver*& receiver) {
  one_thread_.check();
  if (std::exchange(posted_, true)) return;
  loop_.post([this, flow = std::move(flow), &receiver] {
    posted_ = false;
    run_finished();
    if (!ended_ || receiver == nullptr) return;
    std::exchange(receiver, nullptr)->on_closed(*flow, status_);
  });
}

}  // namespace poseidon
