// FlowEnd: how a flow and its sends end. It is the same for every transport.
#pragma once

#include <chrono>
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

/// An error if the receiver gave no place for the payload, or one of another size.
Status check_place(const Result<std::span<std::byte>>& place, const wire::Header& header);

/// Part of a flow. Only the loop's thread uses it.
class FlowEnd {
 public:
  using Done = Flow::Done;

  FlowEnd(Loop& loop, std::string peer_name) : loop_(loop), peer_name_(std::move(peer_name)) {}

  const std::string& peer_name() const { return peer_name_; }
  /// The status for a connection that has ended by itself: ErrorCode::peer_lost.
  Status lost(const std::string& why) const;

  /// If it is not ok, no send can succeed any more.
  const Status& send_error() const { return one_thread_.checked(send_error_); }
  void fail_sends(const Status& status) { one_thread_.checked(send_error_) = status; }

  /// Whether a message can be sent (check_send). If not, its `done` is finished with the reason.
  bool may_send(const Status& send_error, bool open, wire::Header& header, const Pieces& payload, Done& done);

  /// Calls `when_over` after `time`, unless the flow ends before.
  void linger(std::chrono::milliseconds time, std::function<void()> when_over);

  /// Notes that the flow has ended: after its own close() (`ours`), otherwise with `status`. Sends that have not failed
  /// for another reason fail for this one.
  void end(const Status& status, bool ours);
  /// The status for on_closed.
  const Status& status() const { return one_thread_.checked(status_); }

  /// Notes a send's `done`, which must not run inside send. run_finished() runs it.
  void finish(Done done, const Status& status) { one_thread_.checked(finished_).push_back({std::move(done), status}); }
  bool has_finished() const { return !one_thread_.checked(finished_).empty(); }
  void run_finished();
  void drop_finished() { one_thread_.checked(finished_).clear(); }

  /// Posts run_finished() and, if the flow has ended by then, its on_closed. `flow` is the flow of which this is a
  /// part, and `receiver` is the flow's.
  void post(std::shared_ptr<Flow> flow, Receiver*& receiver);

 private:
  struct Finished {
    Done done;
    Status status;
  };

  Loop& loop_;
  const std::string peer_name_;
  Loop::TimerId linger_timer_ = 0;
  Status send_error_;
  Status status_;
  bool ended_ = false;
  std::vector<Finished> finished_;
  bool posted_ = false;
  [[no_unique_address]] OneThread one_thread_{"FlowEnd"};
};

}  // namespace poseidon
