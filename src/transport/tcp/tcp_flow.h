// TcpFlow: one connection of the TCP transport.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "poseidon/options.h"
#include "transport/byte_stream.h"
#include "transport/flow_end.h"
#include "transport/tcp/acknowledgement_watch.h"
#include "transport/tcp/host_queue.h"
#include "transport/tcp/message_reader.h"
#include "transport/tcp/send_queue.h"
#include "transport/transport.h"

namespace poseidon::tcp {

/// Only the loop thread uses it. While the flow has a receiver or something to send, its registration with the loop
/// keeps it alive until on_closed has run. Otherwise, dropping the last reference closes the connection.
class TcpFlow final : public Flow, public std::enable_shared_from_this<TcpFlow> {
 public:
  /// `stream` must be connected. The flow sets its socket's options. The others are those of Admission.
  TcpFlow(Loop& loop, ByteStream stream, std::chrono::milliseconds silence = {},
          CodingPolicy coding = CodingPolicy::off);

  void set_receiver(Receiver* receiver) override;
  void send(wire::Header header, Pieces payload, Done done) override;
  void close(std::chrono::milliseconds linger) override;
  void resume() override;
  Status set_traffic_class(const TrafficClass& traffic_class) override;
  const std::string& peer_name() const override { return end_.peer_name(); }
  bool codes(std::size_t payload_bytes) const override;
  TrafficStats traffic() const override;
  std::uint64_t bytes_delivered() const override;
  Answer answer() const override;
  Delivery delivery() const override;
  void limit_rate(std::uint64_t bytes_per_second) override;
  void hold(std::chrono::microseconds time) override;

 private:
  enum class State {
    open,
    closing,  // close() was called; the flow sends what is queued and drops what arrives
    closed,   // the socket is closed; on_closed has run or is posted
  };

  void on_events(std::uint32_t events);
  void on_unread();
  void go_on();
  bool held() const { return hold_timer_ != 0; }
  bool may_flush() const { return !held() && room_timer_ == 0; }
  void release();
  bool has_unsent() const { return !queue_.empty() || (stream_.has_unsent() && end_.send_error().ok()); }
  void update_watch();
  void note_under_way();
  void choose_coding(wire::Header& header);
  void watch_acknowledgements();
  void adapt_unsent_limit();
  void limit_unsent(int bytes);
  void flush();
  std::size_t room() const;
  void wait_for_room();
  void fail_sends(const Status& status);
  void take_turn();
  void receive();
  void update_low_water();
  void on_read_end(Transfer::Outcome outcome);
  void watch_unread();
  void end(const Status& status);
  void post_finished();

  Loop& loop_;
  ByteStream stream_;
  FlowEnd end_;
  State state_ = State::open;
  std::uint32_t watched_events_ = 0;  // 0: the socket is not registered

  const CodingPolicy coding_;  // off: it stays in the machine
  bool under_way_ = false;     // it has a message for CodingChoice
  SendQueue queue_;
  int unsent_limit_bytes_;         // how much the kernel may hold unsent
  Clock::time_point last_room_{};  // when the kernel last asked for more, while bytes wait without a pause
  bool end_of_stream_sent_ = false;
  Loop::TimerId hold_timer_ = 0;            // not 0: nothing is sent until it ends
  std::optional<HostQueue::Member> place_;  // in the host's queue, where there are several classes
  Loop::TimerId room_timer_ = 0;            // not 0: nothing is sent until the host's queue is asked again
  AcknowledgementWatch acknowledgements_;
  Loop::TimerId acknowledgement_timer_ = 0;

  MessageReader reader_;
  std::size_t low_water_bytes_ = 1;  // the socket counts as readable when it has this many bytes
  Receiver* receiver_ = nullptr;
  // Runs a turn for data that TLS holds, because the socket does not become readable for it.
  Loop::TimerId unread_timer_ = 0;

  std::uint64_t bytes_sent_ = 0;
  std::uint64_t bytes_received_ = 0;
};

}  // namespace poseidon::tcp
