#include "transport/inproc/inproc_flow.h"

#include <cstring>

#include "base/invariant.h"
#include "transport/flow_end.h"
#include "transport/loan.h"

namespace poseidon::inproc {

namespace {

Status closed_by_peer() { return {ErrorCode::peer_lost, "closed by the peer"}; }

}  // namespace

bool Link::post(std::size_t end, std::function<void(InprocFlow*)> task) {
  const std::lock_guard lock(mutex_);
  const End& target = ends_[end];
  if (target.loop == nullptr) return false;
  target.loop->post([flow = target.flow, task = std::move(task)] { task(flow.lock().get()); });
  return true;
}

void Link::attach(std::size_t end, Loop& loop, std::weak_ptr<InprocFlow> flow) {
  const std::lock_guard lock(mutex_);
  ends_[end] = {&loop, std::move(flow)};
}

void Link::detach(std::size_t end) {
  const std::lock_guard lock(mutex_);
  ends_[end] = {};
}

std::pair<std::shared_ptr<InprocFlow>, std::shared_ptr<InprocFlow>> InprocFlow::make_pair(
    Loop& first_loop, std::string first_peer_name, Loop& second_loop, std::string second_peer_name) {
  const auto link = std::make_shared<Link>();
  auto first = std::make_shared<InprocFlow>(first_loop, link, 0, std::move(first_peer_name));
  auto second = std::make_shared<InprocFlow>(second_loop, link, 1, std::move(second_peer_name));
  link->attach(0, first_loop, first);
  link->attach(1, second_loop, second);
  return {std::move(first), std::move(second)};
}

InprocFlow::InprocFlow(Loop& loop, std::shared_ptr<Link> link, std::size_t end, std::string peer_name)
    : loop_(loop), link_(std::move(link)), end_(end), peer_name_(std::move(peer_name)) {}

InprocFlow::~InprocFlow() {
  link_->detach(end_);
  for (const Message& message : waiting_) reply(*link_, 1 - end_, message.id, closed_by_peer());
  if (!closed_) tell_peer_closed();
}

void InprocFlow::set_receiver(Receiver* receiver) {
  loop_.check_thread();
  invariant(receiver_ == nullptr, "a flow gets its receiver once");
  receiver_ = receiver;
  update_registration();
  loop_.post([self = shared_from_this()] {
    self->deliver_waiting();
    self->settle();
  });
}

void InprocFlow::send(wire::Header header, Pieces payload, Done done) {
  loop_.check_thread();
  invariant(header.coding == Coding::none, "only a flow that codes takes what is coded");
  const Status refusal = check_send(end_status_, !closed_, peer_name_, header, payload);
  std::erase_if(payload, [](const auto& piece) { return piece.empty(); });
  if (!refusal.ok()) {
    loop_.post([done = std::move(done), refusal] { done(refusal); });
    return;
  }
  const std::uint64_t id = next_id_++;
  outstanding_.emplace(id, std::move(done));
  update_registration();
  Message message{id, header, std::move(payload)};
  const bool posted =
      link_->post(1 - end_, [message = std::move(message), link = link_, own_end = end_](InprocFlow* peer) mutable {
        if (peer != nullptr) return peer->arrive(std::move(message));
        reply(*link, own_end, message.id, closed_by_peer());
      });
  if (posted) return;
  loop_.post([self = shared_from_this(), id] { self->complete(id, closed_by_peer()); });
  on_peer_closed();
}

void InprocFlow::close(std::chrono::milliseconds) {
  loop_.check_thread();
  // The flow need not linger. What was sent is with the peer already. Its memory comes back when the peer releases it,
  // and on_closed waits for that.
  end({});
}

/// Takes the peer's message on this end's loop.
void InprocFlow::arrive(Message message) {
  if (closed_) return reply(*link_, 1 - end_, message.id, closed_by_peer());
  if (!waiting_.empty() || !may_deliver(message)) return waiting_.push_back(std::move(message));
  if (Status status = deliver(message); !status.ok()) end(status);
}

void InprocFlow::resume() {
  loop_.check_thread();
  if (!waiting_.empty()) loop_.post([self = shared_from_this()] { self->deliver_waiting(); });
}

/// Returns whether the message may be delivered now. A payload of one piece is lent; one of several pieces is copied.
bool InprocFlow::may_deliver(const Message& message) {
  return receiver_ != nullptr && (message.payload.size() <= 1 || receiver_->may_receive(*this, message.header));
}

void InprocFlow::deliver_waiting() {
  while (!closed_ && !waiting_.empty() && may_deliver(waiting_.front())) {
    const Message message = std::move(waiting_.front());
    waiting_.pop_front();
    if (Status status = deliver(message); !status.ok()) end(status);
  }
  if (peer_closed_ && waiting_.empty() && receiver_ != nullptr) on_peer_closed();
}

Status InprocFlow::deliver(const Message& message) {
  if (message.payload.size() > 1) return deliver_copy(message);
  if (message.payload.empty()) {
    reply(*link_, 1 - end_, message.id, {});
    const auto accepted = receiver_->accept(*this, message.header, false);
    if (!accepted.ok() || closed_) return accepted.status();
    return receiver_->on_message(*this, message.header, {}, {});
  }
  auto release = make_loan([link = link_, sender = 1 - end_, id = message.id] { reply(*link, sender, id, {}); });
  const auto accepted = receiver_->accept(*this, message.header, true);
  if (!accepted.ok() || closed_) return accepted.status();
  return receiver_->on_message(*this, message.header, message.payload.front(), std::move(release));
}

Status InprocFlow::deliver_copy(const Message& message) {
  auto place = receiver_->accept(*this, message.header, false);
  if (Status status = check_place(place, message.header); !status.ok() || closed_) {
    reply(*link_, 1 - end_, message.id, closed_by_peer());
    return status;
  }
  std::byte* to = place.value().data();
  for (const auto& piece : message.payload) {
    std::memcpy(to, piece.data(), piece.size());
    to += piece.size();
  }
  reply(*link_, 1 - end_, message.id, {});
  return receiver_->on_message(*this, message.header, place.value(), {});
}

/// Tells the end that sent message `id` that its memory is free.
void InprocFlow::reply(Link& link, std::size_t sender_end, std::uint64_t id, const Status& status) {
  link.post(sender_end, [id, status](InprocFlow* sender) {
    if (sender != nullptr) sender->complete(id, status);
  });
}

/// Notes that the peer has released message `id` of this end.
void InprocFlow::complete(std::uint64_t id, const Status& status) {
  const auto entry = outstanding_.extract(id);
  if (entry.empty()) return;
  entry.mapped()(status.with_context("connection to " + peer_name_ + " ended"));
  settle();
}

void InprocFlow::tell_peer_closed() {
  link_->post(1 - end_, [](InprocFlow* peer) {
    if (peer != nullptr) peer->on_peer_closed();
  });
}

void InprocFlow::on_peer_closed() {
  peer_closed_ = true;
  if (waiting_.empty()) end(closed_by_peer().with_context("connection to " + peer_name_ + " ended"));
}

void InprocFlow::end(const Status& status) {
  if (closed_) return;
  closed_ = true;
  end_status_ = status;
  for (const Message& message : std::exchange(waiting_, {})) {
    reply(*link_, 1 - end_, message.id, closed_by_peer());
  }
  tell_peer_closed();
  loop_.post([self = shared_from_this()] { self->settle(); });
}

/// Runs when a message is complete or the flow has closed. If the flow has closed and none of its memory is lent, it
/// does the flow's last step. It also decides whether the loop has to keep the flow alive.
void InprocFlow::settle() {
  if (closed_ && outstanding_.empty()) {
    link_->detach(end_);
    if (receiver_ != nullptr) std::exchange(receiver_, nullptr)->on_closed(*this, end_status_);
  }
  update_registration();
}

void InprocFlow::update_registration() {
  const bool wanted = receiver_ != nullptr || !outstanding_.empty();
  if (wanted && registration_ == 0) {
    registration_ = loop_.call_at(Clock::time_point::max(), [self = shared_from_this()] {});
  } else if (!wanted && registration_ != 0) {
    loop_.cancel(std::exchange(registration_, 0));
  }
}

}  // namespace poseidon::inproc
