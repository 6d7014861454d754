// UcxFlow: one connection of the UCX transport.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/flow_end.h"
#include "transport/level_queue.h"
#include "transport/tcp/address.h"
#include "transport/transport.h"
#include "transport/ucx/arrivals.h"
#include "transport/ucx/engine.h"
#include "wire/handshake.h"

namespace poseidon::ucx {

/// Only the loop thread uses it. While the flow has a receiver, or an operation that UCX has not completed, it keeps
/// itself alive until on_closed has run. Otherwise, dropping the last reference closes the connection.
///
/// Messages that UCX does not have yet wait here, the most urgent first, because UCX sends in the order of its calls.
///
/// A data message is an active message. Its header is the message's number in the flow (8 bytes) and the wire header.
/// The number is the order in which UCX was given the messages.
///
/// A control message has no payload. The `handshake` takes three of them. Then the listening side sends `welcome`,
/// which completes the connecting side's connect. `fin` says how many messages came before a close.
class UcxFlow final : public Flow, public std::enable_shared_from_this<UcxFlow> {
 public:
  using OnOpen = std::function<void(const Status&)>;

  /// Starts to connect. `on_open` runs once, unless the flow is closed before. Its status is ok when both ends have
  /// proved that they know the secret.
  static std::shared_ptr<UcxFlow> connect(Engine& engine, const std::string& peer_name, const tcp::SocketAddress& peer,
                                          const wire::Credentials& credentials, OnOpen on_open);
  /// Accepts a connection on the listening side. For `on_open` see `connect`. Returns null if the client has gone
  /// already.
  static std::shared_ptr<UcxFlow> accept(Engine& engine, const std::string& peer_name, ucp_conn_request_h request,
                                         const wire::Credentials& credentials, OnOpen on_open);

  UcxFlow(Engine& engine, std::string peer_name, wire::Handshake::Role role, const wire::Credentials& credentials);
  ~UcxFlow() override;

  void set_receiver(Receiver* receiver) override;
  void send(wire::Header header, Pieces payload, Done done) override;
  void close(std::chrono::milliseconds linger) override;
  void resume() override;
  const std::string& peer_name() const override { return end_.peer_name(); }
  TrafficStats traffic() const override {
    return {loop_.checked(bytes_sent_), bytes_received_, bytes_sent_, bytes_received_};
  }
  wire::Handshake::State handshake_state() const { return loop_.checked(handshake_).state(); }

  // The engine calls the following from inside UCX.
  ucs_status_t on_data(std::span<const std::byte> header, void* data, std::size_t data_bytes, bool rendezvous);
  void on_control(std::span<const std::byte> header);
  void on_error(ucs_status_t status);

  /// Closes the endpoint because the engine ends, and calls nobody any more. Returns what kept the flow alive.
  std::shared_ptr<UcxFlow> abandon();

 private:
  enum class State {
    open,
    closing,  // close() was called; the flow sends what is queued and drops what arrives
    ended,    // the endpoint is closed; on_closed has run or waits until UCX has released all memory
  };
  struct Message {
    wire::Header header;
    std::vector<ucp_dt_iov_t> pieces;  // without empty pieces
    Done done;
  };
  struct Operation {
    UcxFlow* flow = nullptr;
    std::list<Operation>* list = nullptr;
    std::list<Operation>::iterator position;
    std::array<std::byte, sizeof(std::uint64_t) + std::max(wire::kHeaderBytes, wire::kLongestHandshakeBytes)> header{};
    std::vector<ucp_dt_iov_t> pieces;
    std::uint64_t message_bytes = 0;
    Done done;  // empty for control messages
  };
  struct Receiving {
    wire::Header header;
    std::span<std::byte> place;
    bool complete = false;
    Status status;
  };

  ucs_status_t open_endpoint(const ucp_ep_params_t& parameters);
  Operation& add_operation(std::list<Operation>& list);
  void post_waiting();
  void post(Operation& operation, unsigned id, std::size_t header_bytes, std::uint64_t payload_bytes);
  void fail_waiting(const Status& status);
  void send_control(std::uint64_t kind, std::span<const std::byte> content);
  void shake_hands();
  void complete(Operation& operation, ucs_status_t status);
  static void on_sent(void* request, ucs_status_t status, void* operation);
  static void on_received(void* request, ucs_status_t status, std::size_t bytes, void* flow);

  void settle_soon();
  void settle();
  void finish();
  void open_or_fail();
  void deliver();
  void deliver_next();
  void receive(const Arrival& arrival, std::span<std::byte> place);
  void finish_receiving();
  void hand_over(const wire::Header& header, std::span<const std::byte> payload);
  void fail(Status status);
  void advance_close();
  void end(const Status& status);
  void close_endpoint();
  void drop_arrivals();
  void release(const Arrival& arrival);
  void update_keep_alive();
  /// Returns why nothing can be sent any more, or ok while it can.
  const Status& send_error() const { return end_.send_error().ok() ? connection_error_ : end_.send_error(); }
  bool ucx_has_memory() const { return !sends_.empty() || !controls_.empty() || receiving_.has_value(); }

  Loop& loop_;
  Engine* engine_;  // null after the engine has ended
  ucp_ep_h endpoint_ = nullptr;
  FlowEnd end_;
  State state_ = State::open;
  bool settle_posted_ = false;
  bool finish_posted_ = false;
  std::shared_ptr<UcxFlow> keep_alive_;
  const wire::Handshake::Role role_;
  wire::Handshake handshake_;
  OnOpen on_open_;
  bool welcomed_ = false;  // both ends know that both know the secret

  LevelQueue<Message> waiting_;
  std::list<Operation> sends_;      // data messages that UCX has
  std::list<Operation> controls_;   // control messages that UCX has
  std::uint64_t posted_bytes_ = 0;  // the bytes of sends_
  std::uint64_t next_sequence_ = 0;
  bool fin_sent_ = false;

  Receiver* receiver_ = nullptr;
  Arrivals arrivals_;
  bool may_deliver_ = true;                // the receiver accepts the next message
  std::optional<Receiving> receiving_;     // the current rendezvous
  std::optional<std::uint64_t> peer_fin_;  // how many messages the peer sent before it closed
  Status connection_error_;                // an error that a callback saw; settle ends the flow with it

  std::uint64_t bytes_sent_ = 0;
  std::uint64_t bytes_received_ = 0;
};

}  // namespace poseidon::ucx
