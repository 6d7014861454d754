// FlowEnd: how a flow and its sends end. It is the same for every transport.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/one_thread.h"
#include "poseidon/status.h"
#include "transport/loop.h"
#include "transport/transport.h"
#include "wire/header.h"

namespace poseidon {

/// Fills in header.payload_bytes. Returns an error if the message cannot be sent: `send_error` if there is one, or that
/// the flow is not open or the payload is too large.
Status check_send(const Status& send_error, bool open, const std::string& peer_name, wire::Header& header,
                  std::span<const std::span<const std::byte>> payload);

/// Part of a flow. Only the loop's thread uses it.
class FlowEnd {
 public:
  using Done = std::function<void(const Status&)>;

  explicit FlowEnd(std::string peer_name) : peer_name_(std::move(peer_name)) {}

  const std::string& peer_name() const { return peer_name_; }
  /// The status for a connection that has ended by itself: ErrorCode::peer_lost.
  Status lost(const std::string& why) const;

  /// If it is not ok, no send can succeed any more.
  const Status& send_error() const {
    one_thread_.check();
    return send_error_;
  }
  void fail_sends(const Status& status) {
    one_thread_.check();
    send_error_ = status;
  }

  /// Notes that the flow has ended: after its own close() (`ours`), otherwise with `status`. Sends that have not failed
  /// for another reason fail for this one.
  void end(const Status& status, bool ours);
  /// The status for on_closed.
  const Status& status() const {
    one_thread_.check();
    return status_;
  }

  /// Notes a send's `done`, which must not run inside send. run_finished() runs it.
  void finish(Done done, const Status& status) {
    one_thread_.check();
    finished_.push_back({std::move(done), status});
  }
  bool has_finished() const {
    one_thread_.check();
    return !finished_.empty();
  }
  void run_finished();
  void drop_finished() {
    one_thread_.check();
    finished_.clear();
  }

  /// Posts run_finished() and, if the flow has ended by then, its on_closed. `flow` is the flow of which this is a
  /// part, and `receiver` is the flow's.
  void post(Loop& loop, std::shared_ptr<Flow> flow, Receiver*& receiver);

 private:
  struct Finished {
    Done done;
    Status status;
  };

  const std::string peer_name_;
  Status send_error_;
  Status status_;
  bool ended_ = false;
  std::vector<Finished> finished_;
  bool posted_ = false;
  [[no_unique_address]] OneThread one_thread_{"FlowEnd"};
};

}  // namespace poseidon
