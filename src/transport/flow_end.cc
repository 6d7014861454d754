#include "transport/flow_end.h"

#include <utility>

#include "base/invariant.h"

namespace poseidon {

Status check_send(const Status& send_error, bool open, const std::string& peer_name, wire::Header& header,
                  std::span<const std::span<const std::byte>> payload) {
  header.payload_bytes = 0;
  for (const auto& piece : payload) header.payload_bytes += piece.size();
  if (!send_error.ok()) return send_error;
  if (!open) return {ErrorCode::shut_down, "connection to " + peer_name + " is closed"};
  if (header.payload_bytes > wire::kMaxPayloadBytes) {
    return {ErrorCode::invalid_argument, "a payload of " + std::to_string(header.payload_bytes) +
                                             " bytes is too large; divide the layer, or lower chunk_bytes"};
  }
  return {};
}

Status FlowEnd::lost(const std::string& why) const {
  return {ErrorCode::peer_lost, "connection to " + peer_name_ + " ended (" + why + ")"};
}

void FlowEnd::end(const Status& status, bool ours) {
  one_thread_.check();
  invariant(!ended_, "a flow ends once");
  ended_ = true;
  status_ = ours ? Status() : status;
  if (!send_error_.ok()) return;
  send_error_ =
      ours ? Status(ErrorCode::shut_down, "connection to " + peer_name_ + " was closed before this was sent") : status;
}

void FlowEnd::run_finished() {
  one_thread_.check();
  for (const auto& [done, status] : std::exchange(finished_, {})) done(status);
}

void FlowEnd::post(Loop& loop, std::shared_ptr<Flow> flow, Receiver*& receiver) {
  one_thread_.check();
  if (std::exchange(posted_, true)) return;
  loop.post([this, flow = std::move(flow), &receiver] {
    posted_ = false;
    run_finished();
    if (!ended_ || receiver == nullptr) return;
    std::exchange(receiver, nullptr)->on_closed(*flow, status_);
  });
}

}  // namespace poseidon
