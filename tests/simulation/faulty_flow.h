// FaultyFlow: one end of a connection of a FaultyNetwork.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "simulation/faulty_network.h"
#include "transport/transport.h"

namespace poseidon::testing {

/// The two ends of a flow, as one of them sees it.
struct Wire {
  std::shared_ptr<FaultyNetwork> network;
  std::string connection;  // its name
  std::shared_ptr<Node> own;
  std::shared_ptr<Node> peer;
};

/// Only the loop thread uses it. Arriving messages are copied and get their faults here, at the receiving end. Kills
/// and half cuts are drawn at the sending end. While the flow has a receiver, or the medium is open, a registration
/// with the loop keeps it alive.
class FaultyFlow final : public Flow, private Receiver, public std::enable_shared_from_this<FaultyFlow> {
 public:
  using Done = std::function<void(const Status&)>;

  FaultyFlow(Loop& loop, std::shared_ptr<Flow> medium, Wire wire);
  ~FaultyFlow() override;

  void set_receiver(Receiver* receiver) override;
  void send(wire::Header header, std::vector<std::span<const std::byte>> payload, Done done) override;
  void close(std::chrono::milliseconds linger) override;
  void resume() override;
  const std::string& peer_name() const override { return medium_->peer_name(); }

  /// Ends the connection, for this end at once. The argument says whether the other end learns of it.
  void lose(const std::string& why, bool tell_peer);

 private:
  class Lent;

  /// A message on its way, or the end of the connection.
  struct Arrival {
    wire::Header header;
    std::vector<std::byte> payload;
    std::size_t first_bytes = 0;  // delivered alone at first; 0: all at once
    bool cut = false;             // nothing comes after the first bytes
    std::optional<Status> end;
  };
  struct Partial {
    Arrival arrival;
    std::span<std::byte> place;
  };

  // The medium's receiver.
  Result<std::span<std::byte>> accept(Flow& flow, const wire::Header& header, bool lent) override;
  Status on_message(Flow& flow, const wire::Header& header, std::span<const std::byte> payload,
                    std::function<void()> release) override;
  void on_closed(Flow& flow, const Status& status) override;

  bool survives_sending();
  void complete(std::uint64_t id, const Status& status);
  void arrive(Arrival arrival);
  void enqueue(Arrival arrival, Clock::time_point due);
  void pump();
  void note_delivery(const Arrival& arrival) const;
  void deliver(Arrival arrival);
  void deliver_rest();
  void refuse(const Status& status);
  void drop_arrivals();
  void finish();
  void update_registration();

  Loop& loop_;
  const std::shared_ptr<Flow> medium_;
  const Wire wire_;
  const std::uint64_t send_key_;  // the key of this end's draws
  const std::uint64_t arrival_key_;
  Loop::TimerId registration_ = 0;  // a timer that never fires; 0: none

  bool open_ = true;
  bool finished_ = false;      // on_closed has run, if there was a receiver
  bool medium_heard_ = false;  // it has this as its receiver,
  bool medium_ended_ = false;  // until here
  Status end_status_;

  std::uint64_t sent_count_ = 0;
  std::map<std::uint64_t, Done> outstanding_;  // sent, not yet taken by the medium

  Receiver* receiver_ = nullptr;
  std::uint64_t arrived_count_ = 0;
  std::map<std::pair<Clock::time_point, std::uint64_t>, Arrival> arrivals_;  // by when they are due, then by order
  std::uint64_t queued_count_ = 0;
  Clock::time_point last_due_{};  // nothing that comes later is due before, unless it overtakes
  std::optional<Partial> partial_;
  bool waiting_ = false;  // the receiver does not let the next payload come
  Loop::TimerId timer_ = 0;
};

}  // namespace poseidon::testing
