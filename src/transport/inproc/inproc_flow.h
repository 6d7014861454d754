// InprocFlow: one end of a connection inside the process.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "transport/transport.h"

namespace poseidon::inproc {

class InprocFlow;

/// What the two ends share: how to reach the other end's loop for as long as that end exists.
class Link {
 public:
  /// Runs `task` on the end's loop with its flow, or with null if the flow has gone meanwhile. Returns false if it has
  /// gone already. Any thread may call it.
  bool post(std::size_t end, std::function<void(InprocFlow*)> task);

  /// After `attach` the end takes tasks; after `detach` it takes no more.
  void attach(std::size_t end, Loop& loop, std::weak_ptr<InprocFlow> flow);
  void detach(std::size_t end);

 private:
  struct End {
    Loop* loop = nullptr;
    std::weak_ptr<InprocFlow> flow;
  };
  std::mutex mutex_;
  std::array<End, 2> ends_;  // guarded by mutex_
};

/// Only the loop thread uses it. While the flow has a receiver or lent memory, a registration with the loop keeps it
/// alive until on_closed has run. Otherwise, dropping the last reference closes the connection.
class InprocFlow final : public Flow, public std::enable_shared_from_this<InprocFlow> {
 public:
  /// Returns the two ends; the first one is on `first_loop`. Each end is used on its own loop only.
  static std::pair<std::shared_ptr<InprocFlow>, std::shared_ptr<InprocFlow>> make_pair(Loop& first_loop,
                                                                                       std::string first_peer_name,
                                                                                       Loop& second_loop,
                                                                                       std::string second_peer_name);

  InprocFlow(Loop& loop, std::shared_ptr<Link> link, std::size_t end, std::string peer_name);
  ~InprocFlow() override;

  void set_receiver(Receiver* receiver) override;
  void send(wire::Header header, Pieces payload, Done done) override;
  void close(std::chrono::milliseconds linger) override;
  void resume() override;
  const std::string& peer_name() const override { return peer_name_; }

 private:
  struct Message {
    std::uint64_t id = 0;
    wire::Header header;
    Pieces payload;  // the sender's memory, without empty pieces
  };

  void arrive(Message message);
  bool may_deliver(const Message& message);
  Status deliver(const Message& message);
  Status deliver_copy(const Message& message);
  void deliver_waiting();
  void on_peer_closed();
  void complete(std::uint64_t id, const Status& status);
  static void reply(Link& link, std::size_t sender_end, std::uint64_t id, const Status& status);
  void tell_peer_closed();
  void end(const Status& status);
  void settle();
  void update_registration();

  Loop& loop_;
  const std::shared_ptr<Link> link_;
  const std::size_t end_;
  const std::string peer_name_;
  Loop::TimerId registration_ = 0;  // a timer that never fires; 0: none

  std::unordered_map<std::uint64_t, Done> outstanding_;  // of sent messages whose memory the peer may still use
  std::uint64_t next_id_ = 1;

  Receiver* receiver_ = nullptr;
  std::deque<Message> waiting_;  // messages for the receiver
  bool peer_closed_ = false;
  bool closed_ = false;
  Status end_status_;
};

}  // namespace poseidon::inproc
