// ShmFlow: one end of a connection of the shared-memory transport.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "base/file_descriptor.h"
#include "transport/flow_end.h"
#include "transport/shm/inbox.h"
#include "transport/shm/outbox.h"
#include "transport/shm/send_queue.h"
#include "transport/transport.h"

namespace poseidon::shm {

/// Only the loop thread uses it. While the flow has a receiver or something to send, its registration with the loop
/// keeps it alive until on_closed has run. Otherwise, dropping the last reference closes the connection.
class ShmFlow final : public Flow, public std::enable_shared_from_this<ShmFlow> {
 public:
  /// `socket` must be connected to the process that shares `segment`. It tells when that process has gone.
  ShmFlow(Loop& loop, FileDescriptor socket, std::shared_ptr<Segment> segment, std::string peer_name);

  void set_receiver(Receiver* receiver) override;
  void send(wire::Header header, Pieces payload, Done done) override;
  void close(std::chrono::milliseconds linger) override;
  void resume() override;
  const std::string& peer_name() const override { return end_.peer_name(); }

 private:
  enum class State {
    open,
    closing,  // close() was called; the flow sends what is queued and drops what arrives
    closed,   // the socket is closed; on_closed has run or is posted
  };
  /// What is left after a turn of sending or receiving.
  enum class Rest { nothing, blocked, more };

  void on_wake();
  void on_socket();
  void work();
  void post_work();
  Rest flush();
  Result<bool> send_piece();
  Rest receive();
  Status take(const Descriptor& descriptor);
  Status start_message(const Descriptor& descriptor);
  Status deliver_whole(bool lent, std::span<const std::byte> payload, std::function<void()> release);
  Status take_piece(const Descriptor& descriptor);
  void wait_for_room(Rest rest);
  void update_watch();
  void unwatch();
  void fail_sends(const Status& status);
  void end(const Status& status);
  void post_finished();
  Status misfit(std::uint64_t size_bytes) const;

  Loop& loop_;
  FileDescriptor socket_;
  const std::shared_ptr<Segment> segment_;
  FlowEnd end_;
  State state_ = State::open;
  bool watched_ = false;
  bool peer_gone_ = false;  // nothing more comes than what is in the shared memory
  bool work_posted_ = false;

  Outbox outbox_;
  SendQueue queue_;

  Inbox inbox_;
  std::optional<Descriptor> waiting_;  // a message whose payload may not come yet
  bool in_payload_ = false;
  wire::Header header_;  // the header of the message that arrives in pieces
  std::span<std::byte> payload_;
  std::size_t received_bytes_ = 0;  // how much of payload_ has arrived
  Receiver* receiver_ = nullptr;
};

}  // namespace poseidon::shm
