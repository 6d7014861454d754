#ifdef POSEIDON_HAVE_UCX

#include "transport/ucx/ucx_flow.h"

#include <cstring>
#include <utility>

#include "base/invariant.h"

namespace poseidon::ucx {

namespace {

constexpr std::size_t kNumberBytes = sizeof(std::uint64_t);

// The kinds of control messages.
constexpr std::uint64_t kWelcome = 1;    // its content is empty
constexpr std::uint64_t kFin = 2;        // its content is the number of data messages that came before
constexpr std::uint64_t kHandshake = 3;  // its content is one of the handshake's messages
constexpr std::size_t kDataHeaderBytes = kNumberBytes + wire::kHeaderBytes;

// UCX gets the next message while it has less than this. It is enough to keep a 100 Gb/s link busy for 80 µs, many
// times what it takes to complete a send and to post another. It is little enough for an urgent message to be sent
// soon.
constexpr std::uint64_t kPostedBytes = std::uint64_t{1} << 20;
// Large messages follow each other without a pause, too: the next one is announced while one is being fetched.
constexpr std::size_t kPostedCount = 2;

// The number has this host's byte order. UCX itself needs both ends to have the same byte order.
void put(std::span<std::byte> out, std::uint64_t number) { std::memcpy(out.data(), &number, kNumberBytes); }

std::uint64_t get(std::span<const std::byte> in) {
  std::uint64_t number = 0;
  std::memcpy(&number, in.data(), kNumberBytes);
  return number;
}

}  // namespace

std::shared_ptr<UcxFlow> UcxFlow::connect(Engine& engine, const std::string& peer_name, const tcp::SocketAddress& peer,
                                          const wire::Credentials& credentials, OnOpen on_open) {
  auto flow = std::make_shared<UcxFlow>(engine, peer_name, wire::Handshake::Role::connector, credentials);
  flow->on_open_ = std::move(on_open);
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR;
  params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
  params.sockaddr.addr = peer.get();
  params.sockaddr.addrlen = peer.size_bytes;
  if (const ucs_status_t status = flow->open_endpoint(params); status != UCS_OK) flow->on_error(status);
  flow->settle_soon();
  return flow;
}

std::shared_ptr<UcxFlow> UcxFlow::accept(Engine& engine, const std::string& peer_name, ucp_conn_request_h request,
                                         const wire::Credentials& credentials, OnOpen on_open) {
  auto flow = std::make_shared<UcxFlow>(engine, peer_name, wire::Handshake::Role::acceptor, credentials);
  flow->on_open_ = std::move(on_open);
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST;
  params.conn_request = request;
  if (flow->open_endpoint(params) != UCS_OK) return nullptr;
  return flow;
}

UcxFlow::UcxFlow(Engine& engine, std::string peer_name, wire::Handshake::Role role,
                 const wire::Credentials& credentials)
    : loop_(engine.loop()),
      engine_(&engine),
      end_(loop_, std::move(peer_name)),
      role_(role),
      handshake_(role, wire::Purpose::flow, credentials, wire::random_nonce()) {
  engine.add(*this);
}

UcxFlow::~UcxFlow() {
  if (engine_ == nullptr) return;
  close_endpoint();
  drop_arrivals();
  engine_->remove(*this);
}

std::shared_ptr<UcxFlow> UcxFlow::abandon() {
  loop_.check_thread();
  auto self = shared_from_this();
  keep_alive_.reset();
  close_endpoint();
  drop_arrivals();
  engine_->remove(*this);
  engine_ = nullptr;
  state_ = State::ended;
  receiver_ = nullptr;
  on_open_ = nullptr;
  end_.drop_finished();
  return self;
}

ucs_status_t UcxFlow::open_endpoint(const ucp_ep_params_t& parameters) {
  return engine_->create_endpoint(parameters, *this, endpoint_);
}

void UcxFlow::close_endpoint() {
  if (endpoint_ != nullptr) engine_->close_endpoint(std::exchange(endpoint_, nullptr));
}

void UcxFlow::set_receiver(Receiver* receiver) {
  loop_.check_thread();
  invariant(receiver_ == nullptr, "a flow gets its receiver once");
  receiver_ = receiver;
  update_keep_alive();
  settle_soon();
}

void UcxFlow::send(wire::Header header, Pieces payload, Done done) {
  loop_.check_thread();
  invariant(header.coding == Coding::none, "only a flow that codes takes what is coded");
  if (!end_.may_send(send_error(), state_ == State::open, header, payload, done)) {
    update_keep_alive();
    return settle_soon();
  }
  Message message{header, {}, std::move(done)};
  message.pieces.reserve(payload.size());
  for (const auto& piece : payload) {
    // UCX takes the memory of sends as mutable, but does not write to it.
    if (!piece.empty()) message.pieces.push_back({const_cast<std::byte*>(piece.data()), piece.size()});
  }
  waiting_.push(header.priority, std::move(message));
  update_keep_alive();
  post_waiting();
}

/// Gives UCX as many of the waiting messages as it should have.
void UcxFlow::post_waiting() {
  while (!waiting_.empty() && send_error().ok() && (posted_bytes_ < kPostedBytes || sends_.size() < kPostedCount)) {
    Message message = waiting_.pop();
    Operation& operation = add_operation(sends_);
    put(operation.header, next_sequence_++);
    wire::encode(message.header, std::span(operation.header).subspan<kNumberBytes, wire::kHeaderBytes>());
    operation.pieces = std::move(message.pieces);
    operation.message_bytes = wire::kHeaderBytes + message.header.payload_bytes;
    operation.done = std::move(message.done);
    posted_bytes_ += operation.message_bytes;
    post(operation, kDataId, kDataHeaderBytes, message.header.payload_bytes);
  }
}

void UcxFlow::fail_waiting(const Status& status) {
  while (!waiting_.empty()) end_.finish(waiting_.pop().done, status);
}

void UcxFlow::send_control(std::uint64_t kind, std::span<const std::byte> content) {
  Operation& operation = add_operation(controls_);
  put(operation.header, kind);
  std::ranges::copy(content, operation.header.begin() + kNumberBytes);
  post(operation, kControlId, kNumberBytes + content.size(), 0);
}

/// Sends what the handshake has to send now. Nobody sends data before the welcome, because UCX does not keep the order
/// of messages.
void UcxFlow::shake_hands() {
  if (state_ != State::open || endpoint_ == nullptr || !connection_error_.ok()) return;
  if (const auto out = handshake_.take_outgoing(); !out.empty()) send_control(kHandshake, out);
  if (handshake_.state() != wire::Handshake::State::done || role_ == wire::Handshake::Role::connector) return;
  if (!std::exchange(welcomed_, true)) send_control(kWelcome, {});
}

UcxFlow::Operation& UcxFlow::add_operation(std::list<Operation>& list) {
  Operation& operation = list.emplace_back();
  operation.flow = this;
  operation.list = &list;
  operation.position = std::prev(list.end());
  update_keep_alive();
  return operation;
}

void UcxFlow::post(Operation& operation, unsigned id, std::size_t header_bytes, std::uint64_t payload_bytes) {
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  params.cb.send = &UcxFlow::on_sent;
  params.user_data = &operation;
  params.flags = UCP_AM_SEND_FLAG_REPLY;  // tells the peer's engine the endpoint
  if (payload_bytes > kUcxEagerBytes) params.flags |= UCP_AM_SEND_FLAG_RNDV;
  const void* buffer = nullptr;
  std::size_t count = 0;
  if (operation.pieces.size() == 1) {
    buffer = operation.pieces.front().buffer;
    count = operation.pieces.front().length;
  } else if (!operation.pieces.empty()) {
    params.op_attr_mask |= UCP_OP_ATTR_FIELD_DATATYPE;
    params.datatype = ucp_dt_make_iov();
    buffer = operation.pieces.data();
    count = operation.pieces.size();
  }
  const ucs_status_ptr_t request =
      ::ucp_am_send_nbx(endpoint_, id, operation.header.data(), header_bytes, buffer, count, &params);
  if (!UCS_PTR_IS_PTR(request)) complete(operation, UCS_PTR_STATUS(request));
  settle_soon();
}

void UcxFlow::on_sent(void* request, ucs_status_t status, void* operation) {
  auto& sent = *static_cast<Operation*>(operation);
  sent.flow->complete(sent, status);
  ::ucp_request_free(request);
}

void UcxFlow::complete(Operation& operation, ucs_status_t status) {
  Status result;
  if (status != UCS_OK) {
    result = end_.send_error().ok() ? end_.lost(text_of(status)) : end_.send_error();
    end_.fail_sends(result);
    fail(result);
  }
  if (operation.done) {
    if (result.ok()) bytes_sent_ += operation.message_bytes;
    end_.finish(std::move(operation.done), result);
  }
  posted_bytes_ -= operation.message_bytes;
  operation.list->erase(operation.position);
  settle_soon();
}

ucs_status_t UcxFlow::on_data(std::span<const std::byte> header, void* data, std::size_t data_bytes, bool rendezvous) {
  loop_.check_thread();
  if (state_ != State::open || !connection_error_.ok()) return UCS_OK;  // UCS_OK tells the sender to go on
  if (handshake_.state() != wire::Handshake::State::done) {
    fail({ErrorCode::mismatch, "message from " + end_.peer_name() + ": data before the handshake"});
    return UCS_OK;
  }
  if (header.size() != kDataHeaderBytes) {
    fail({ErrorCode::mismatch,
          concat("message from ", end_.peer_name(), ": a header of ", header.size(), " bytes, which no message has")});
    return UCS_OK;
  }
  Arrival arrival;
  arrival.data = data_bytes == 0 ? nullptr : data;
  arrival.rendezvous = rendezvous;
  if (Status status = wire::decode(header.last<wire::kHeaderBytes>(), arrival.header); !status.ok()) {
    fail(status.with_context("message from " + end_.peer_name()));
    return UCS_OK;
  }
  const std::uint64_t sequence = get(header);
  if (arrival.header.payload_bytes != data_bytes) {
    fail({ErrorCode::mismatch, concat("message from ", end_.peer_name(), ": its payload has ", data_bytes,
                                      " bytes, its header says ", arrival.header.payload_bytes)});
    return UCS_OK;
  }
  if (!arrivals_.insert(sequence, arrival)) {
    fail({ErrorCode::mismatch, concat("message from ", end_.peer_name(), ": unexpected number ", sequence)});
    return UCS_OK;
  }
  settle_soon();
  return data_bytes == 0 ? UCS_OK : UCS_INPROGRESS;
}

void UcxFlow::on_control(std::span<const std::byte> header) {
  loop_.check_thread();
  const std::uint64_t kind = header.size() < kNumberBytes ? 0 : get(header);
  const auto content = header.subspan(std::min(header.size(), kNumberBytes));
  const bool proven = handshake_.state() == wire::Handshake::State::done;
  if (kind == kHandshake && content.size() <= handshake_.wanted_bytes()) {
    handshake_.receive(content);
    if (handshake_.state() == wire::Handshake::State::foreign || handshake_.state() == wire::Handshake::State::unproven)
      fail(wire::handshake_error(handshake_.state(), end_.peer_name()));
  } else if (kind == kWelcome && proven && role_ == wire::Handshake::Role::connector) {
    welcomed_ = true;
  } else if (kind == kFin && proven && content.size() == kNumberBytes && !peer_fin_) {
    peer_fin_ = get(content);
  } else {
    fail({ErrorCode::mismatch, "message from " + end_.peer_name() + ": unexpected control message"});
  }
  settle_soon();
}

void UcxFlow::on_error(ucs_status_t status) {
  loop_.check_thread();
  fail(end_.lost(text_of(status)));
}

void UcxFlow::fail(Status status) {
  if (connection_error_.ok()) connection_error_ = std::move(status);
  settle_soon();
}

void UcxFlow::close(std::chrono::milliseconds linger) {
  loop_.check_thread();
  if (state_ != State::open) return;
  state_ = State::closing;
  on_open_ = nullptr;
  if (linger.count() <= 0) return end({});
  drop_arrivals();  // tells the peer to go on
  end_.linger(linger, [self = shared_from_this()] { self->end({}); });
  settle_soon();
}

void UcxFlow::settle_soon() {
  if (engine_ == nullptr || std::exchange(settle_posted_, true)) return;
  engine_->defer([weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->settle();
  });
}

/// Makes all calls to the owner. It runs after UCX's callbacks have recorded what happened, and never inside them or
/// inside send.
void UcxFlow::settle() {
  settle_posted_ = false;
  post_waiting();
  if (!send_error().ok()) fail_waiting(send_error());
  end_.run_finished();
  shake_hands();
  open_or_fail();
  if (state_ == State::open) deliver();
  if (state_ == State::closing) advance_close();
  if (state_ != State::open && receiving_ && receiving_->complete) receiving_.reset();
  if (state_ == State::ended && receiver_ != nullptr && !ucx_has_memory() && !std::exchange(finish_posted_, true)) {
    // Posted behind the sends in the loop's queue, so that their `done` functions run first.
    loop_.post([self = shared_from_this()] { self->finish(); });
  }
  update_keep_alive();
}

void UcxFlow::finish() {
  end_.run_finished();
  if (receiver_ != nullptr) std::exchange(receiver_, nullptr)->on_closed(*this, end_.status());
  update_keep_alive();
}

void UcxFlow::open_or_fail() {
  if (!on_open_ || (!welcomed_ && connection_error_.ok())) return;
  const auto on_open = std::exchange(on_open_, nullptr);
  if (welcomed_) set_key_id(handshake_.key_name());
  if (!welcomed_) end(connection_error_);
  on_open(welcomed_ ? Status() : connection_error_);
}

void UcxFlow::deliver() {
  if (receiver_ == nullptr) return;
  if (receiving_ && receiving_->complete) finish_receiving();
  while (state_ == State::open && may_deliver_ && !receiving_ && arrivals_.front() != nullptr) {
    // What has arrived is delivered even if the connection has ended since. What the peer still holds is lost.
    if (arrivals_.front()->rendezvous && !connection_error_.ok()) break;
    deliver_next();
  }
  if (state_ != State::open) return;
  if (!connection_error_.ok()) return end(connection_error_);
  if (peer_fin_ && *peer_fin_ <= arrivals_.next() && !receiving_) end(end_.lost("closed by the peer"));
}

void UcxFlow::resume() {
  loop_.check_thread();
  if (!std::exchange(may_deliver_, true)) settle_soon();
}

void UcxFlow::deliver_next() {
  const Arrival& next = *arrivals_.front();
  may_deliver_ = receiver_->may_receive(*this, next.header);
  if (!may_deliver_ || state_ != State::open) return;
  const Arrival arrival = arrivals_.take();
  const auto place = receiver_->accept(*this, arrival.header, false);
  if (Status status = check_place(place, arrival.header); !status.ok() || state_ != State::open) {
    release(arrival);
    if (state_ == State::open) end(status);
    return;
  }
  if (arrival.data == nullptr) return hand_over(arrival.header, {});
  if (arrival.rendezvous) return receive(arrival, place.value());
  std::memcpy(place.value().data(), arrival.data, place.value().size());
  release(arrival);
  hand_over(arrival.header, place.value());
}

void UcxFlow::receive(const Arrival& arrival, std::span<std::byte> place) {
  receiving_ = Receiving{arrival.header, place, false, {}};
  update_keep_alive();
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  params.cb.recv_am = &UcxFlow::on_received;
  params.user_data = this;
  const ucs_status_ptr_t request =
      ::ucp_am_recv_data_nbx(engine_->get(), arrival.data, place.data(), place.size(), &params);
  if (UCS_PTR_IS_PTR(request)) return;
  receiving_->complete = true;
  if (UCS_PTR_IS_ERR(request)) receiving_->status = end_.lost(text_of(UCS_PTR_STATUS(request)));
  finish_receiving();
}

void UcxFlow::on_received(void* request, ucs_status_t status, std::size_t bytes, void* flow) {
  auto& self = *static_cast<UcxFlow*>(flow);
  self.receiving_->complete = true;
  if (status != UCS_OK) {
    self.receiving_->status = self.end_.lost(text_of(status));
  } else if (bytes != self.receiving_->place.size()) {
    self.receiving_->status = self.end_.lost("a payload was cut short");
  }
  ::ucp_request_free(request);
  self.settle_soon();
}

void UcxFlow::finish_receiving() {
  invariant(receiving_ && receiving_->complete, "a payload is handed over when all of it is here");
  const Receiving received = std::move(*receiving_);
  receiving_.reset();
  if (!received.status.ok()) return end(received.status);
  hand_over(received.header, received.place);
}

void UcxFlow::hand_over(const wire::Header& header, std::span<const std::byte> payload) {
  bytes_received_ += wire::kHeaderBytes + payload.size();
  if (Status status = receiver_->on_message(*this, header, payload, {}); !status.ok()) end(status);
}

/// Sends the fin when the peer has taken everything. So nothing is lost, whichever side closes first after that.
void UcxFlow::advance_close() {
  if (!connection_error_.ok()) return end({});
  if (!waiting_.empty() || !sends_.empty()) return;
  if (!std::exchange(fin_sent_, true)) send_control(kFin, std::as_bytes(std::span(&next_sequence_, 1)));
  if (peer_fin_ && controls_.empty()) end({});
}

void UcxFlow::end(const Status& status) {
  if (state_ == State::ended) return;
  const bool ours = state_ == State::closing;
  state_ = State::ended;
  end_.end(status, ours);
  fail_waiting(end_.send_error());
  update_keep_alive();
  close_endpoint();
  drop_arrivals();  // comes after the close, so that the peer does not count an undelivered payload as received
  settle_soon();
}

void UcxFlow::drop_arrivals() {
  for (const auto& arrival : arrivals_.take_all()) {
    if (arrival) release(*arrival);
  }
}

void UcxFlow::release(const Arrival& arrival) {
  if (arrival.data != nullptr) ::ucp_am_data_release(engine_->get(), arrival.data);
}

void UcxFlow::update_keep_alive() {
  const bool wanted = engine_ != nullptr && (receiver_ != nullptr || !waiting_.empty() || ucx_has_memory() ||
                                             end_.has_finished() || state_ == State::closing);
  if (!wanted) {
    keep_alive_.reset();
  } else if (keep_alive_ == nullptr) {
    keep_alive_ = shared_from_this();
  }
}

}  // namespace poseidon::ucx

#endif  // POSEIDON_HAVE_UCX
