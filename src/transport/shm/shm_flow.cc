#include "transport/shm/shm_flow.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/invariant.h"

namespace poseidon::shm {

namespace {

// A payload that is too large to be lent is sent in pieces of this size. So both sides copy at the same time, and the
// pieces stay in the cache.
constexpr std::size_t kPieceBytes = 128u << 10;
// How much one flow reads in a turn, so that the loop's other flows get their turns.
constexpr std::size_t kReadBudgetBytes = 2u << 20;
constexpr std::size_t kWriteBudgetBytes = 2u << 20;

}  // namespace

ShmFlow::ShmFlow(Loop& loop, FileDescriptor socket, std::shared_ptr<Segment> segment, std::string peer_name)
    : loop_(loop),
      socket_(std::move(socket)),
      segment_(std::move(segment)),
      end_(loop, std::move(peer_name)),
      outbox_(segment_),
      inbox_(segment_) {}

void ShmFlow::set_receiver(Receiver* receiver) {
  loop_.check_thread();
  invariant(receiver_ == nullptr, "a flow gets its receiver once");
  receiver_ = receiver;
  if (state_ == State::closed) return post_finished();
  if (state_ == State::open) update_watch();
  post_work();
}

void ShmFlow::send(wire::Header header, Pieces payload, Done done) {
  loop_.check_thread();
  invariant(header.coding == Coding::none, "only a flow that codes takes what is coded");
  if (!end_.may_send(end_.send_error(), state_ == State::open, header, payload, done)) return post_finished();
  const bool idle = queue_.empty();
  queue_.push(header, std::move(payload), std::move(done));
  if (!idle) return;  // more work is posted, or the peer will wake this end
  const Rest rest = flush();
  if (state_ == State::closed) return;
  update_watch();
  wait_for_room(rest);
  if (end_.has_finished()) post_finished();
}

void ShmFlow::close(std::chrono::milliseconds linger) {
  loop_.check_thread();
  if (state_ != State::open) return;
  state_ = State::closing;
  if (const auto waited = std::exchange(waiting_, std::nullopt)) inbox_.give_back(*waited);
  const Rest rest = flush();
  if (state_ == State::closed) return;
  // The peer can read what is in the shared memory even after this end has gone.
  if (queue_.empty() || linger.count() <= 0) return end({});
  end_.linger(linger, [self = shared_from_this()] { self->end({}); });
  update_watch();
  wait_for_room(rest);
  post_work();  // drops what has arrived, because the peer may be waiting for room, too
}

void ShmFlow::resume() {
  loop_.check_thread();
  if (waiting_) post_work();
}

void ShmFlow::on_wake() {
  std::uint64_t count = 0;
  const ssize_t got = ::read(segment_->own_wake(), &count, sizeof(count));
  // If the peer has passed something other than an eventfd, it might never stop being readable.
  if (got >= 0 && got != static_cast<ssize_t>(sizeof(count))) {
    return end(
        Status(ErrorCode::mismatch, "message from " + end_.peer_name() + ": its wake-up descriptor is no eventfd"));
  }
  work();
}

/// Only the end of the connection comes over the socket.
void ShmFlow::on_socket() {
  std::byte byte{};
  const ssize_t got = ::recv(socket_.get(), &byte, 1, MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got > 0)
    return end(Status(ErrorCode::mismatch, "message from " + end_.peer_name() + ": unexpected bytes on the socket"));
  peer_gone_ = true;
  loop_.unwatch(socket_.get());
  const auto self = shared_from_this();
  fail_sends(end_.lost("closed by the peer"));
  work();
}

/// Does one turn: sends and receives what it can, and arranges another turn if there is more.
void ShmFlow::work() {
  const auto self = shared_from_this();
  if (state_ == State::closed) return;
  const Rest sending = flush();
  end_.run_finished();
  const Rest receiving = receive();
  if (state_ == State::closed) return;
  if (state_ == State::closing && queue_.empty()) return end({});
  update_watch();
  wait_for_room(sending);
  if (receiving == Rest::more || (receiving == Rest::nothing && !inbox_.sleep())) post_work();
}

void ShmFlow::post_work() {
  if (std::exchange(work_posted_, true)) return;
  loop_.post([self = shared_from_this()] {
    self->work_posted_ = false;
    self->work();
  });
}

/// Called after a flush. Arranges to be woken when there is something left to send and it can go on.
void ShmFlow::wait_for_room(Rest rest) {
  if (queue_.empty()) return;
  if (rest == Rest::more || !outbox_.wait()) post_work();
}

ShmFlow::Rest ShmFlow::flush() {
  std::uint64_t sent_bytes = 0;
  while (!queue_.empty()) {
    if (sent_bytes >= kWriteBudgetBytes) return Rest::more;
    queue_.begin();
    const std::uint64_t left_bytes = queue_.left_bytes();
    auto sent = send_piece();
    if (!sent.ok()) {
      end(sent.status().with_context("message from " + end_.peer_name()));
      return Rest::nothing;
    }
    if (!sent.value()) return Rest::blocked;
    sent_bytes += left_bytes - queue_.left_bytes();
    if (queue_.left_bytes() == 0) end_.finish(queue_.pop(), Status());
  }
  return Rest::nothing;
}

/// Sends the next piece of the first message. Returns false if there is no room for it.
Result<bool> ShmFlow::send_piece() {
  const bool first = queue_.copied_bytes() == 0;
  const bool whole = first && queue_.left_bytes() <= kLendableBytes;
  Outbox::Place place;
  auto reserved =
      outbox_.reserve(whole ? queue_.left_bytes() : std::min<std::uint64_t>(queue_.left_bytes(), kPieceBytes), place);
  if (!reserved.ok() || !reserved.value()) return reserved;
  Descriptor descriptor;
  descriptor.kind = first ? Descriptor::Kind::message : Descriptor::Kind::piece;
  if (first) wire::encode(queue_.header(), descriptor.header);
  queue_.copy(place.memory);
  outbox_.publish(descriptor, place);
  return true;
}

ShmFlow::Rest ShmFlow::receive() {
  std::uint64_t taken_bytes = 0;
  while (state_ == State::closing || (state_ == State::open && receiver_ != nullptr)) {
    if (taken_bytes >= kReadBudgetBytes) return Rest::more;
    auto descriptor = waiting_ ? Result(std::exchange(waiting_, std::nullopt)) : inbox_.next();
    Status status = descriptor.status();
    if (status.ok() && !descriptor.value()) {
      if (!peer_gone_) return Rest::nothing;
      end(end_.lost(in_payload_ ? "closed by the peer in the middle of a message" : "closed by the peer"));
      return Rest::blocked;
    }
    if (!status.ok()) {
      status = status.with_context("message from " + end_.peer_name());
    } else {
      taken_bytes += descriptor.value()->data_bytes;
      status = take(*descriptor.value());
    }
    if (!status.ok()) end(status);
    if (waiting_) break;
  }
  return Rest::blocked;
}

Status ShmFlow::take(const Descriptor& descriptor) {
  if (state_ == State::closing) {
    inbox_.give_back(descriptor);
    return {};
  }
  if (in_payload_ != (descriptor.kind == Descriptor::Kind::piece)) {
    return {ErrorCode::mismatch,
            "message from " + end_.peer_name() + ": a piece or a header where the other was expected"};
  }
  return in_payload_ ? take_piece(descriptor) : start_message(descriptor);
}

Status ShmFlow::start_message(const Descriptor& descriptor) {
  if (Status status = wire::decode(descriptor.header, header_); !status.ok())
    return status.with_context("message from " + end_.peer_name());
  if (descriptor.data_bytes > header_.payload_bytes || (descriptor.data_bytes == 0 && header_.payload_bytes > 0)) {
    return misfit(descriptor.data_bytes);
  }
  if (header_.payload_bytes == 0) return deliver_whole(false, {}, {});
  if (descriptor.data_bytes == header_.payload_bytes && descriptor.data_bytes <= kLendableBytes) {
    if (auto release = inbox_.lend(descriptor)) return deliver_whole(true, inbox_.data(descriptor), std::move(release));
  }
  const bool may_come = receiver_->may_receive(*this, header_);
  if (state_ != State::open) return {};
  if (!may_come) {
    waiting_ = descriptor;
    return {};
  }
  auto place = receiver_->accept(*this, header_, false);
  if (state_ != State::open) return {};
  if (Status status = check_place(place, header_); !status.ok()) return status;
  in_payload_ = true;
  payload_ = place.value();
  received_bytes_ = 0;
  return take_piece(descriptor);
}

/// Delivers a message that needs no memory of the receiver's.
Status ShmFlow::deliver_whole(bool lent, std::span<const std::byte> payload, std::function<void()> release) {
  const auto accepted = receiver_->accept(*this, header_, lent);
  if (!accepted.ok() || state_ != State::open) return accepted.status();
  return receiver_->on_message(*this, header_, payload, std::move(release));
}

Status ShmFlow::take_piece(const Descriptor& descriptor) {
  const auto data = inbox_.data(descriptor);
  if (data.empty() || data.size() > payload_.size() - received_bytes_) return misfit(data.size());
  std::memcpy(payload_.data() + received_bytes_, data.data(), data.size());
  inbox_.give_back(descriptor);
  received_bytes_ += data.size();
  if (received_bytes_ < payload_.size()) {
    receiver_->on_progress(*this, header_, received_bytes_);
    return {};
  }
  in_payload_ = false;
  return receiver_->on_message(*this, header_, std::exchange(payload_, {}), {});
}

void ShmFlow::update_watch() {
  if (state_ == State::closed) return;
  const bool wanted = receiver_ != nullptr || !queue_.empty();
  if (wanted == watched_) return;
  if (!wanted) return unwatch();
  const auto self = shared_from_this();
  Status status = loop_.watch(segment_->own_wake(), EPOLLIN, [self](std::uint32_t) { self->on_wake(); });
  if (!status.ok()) return end(status);
  watched_ = true;
  if (peer_gone_) return;
  status = loop_.watch(socket_.get(), EPOLLIN | EPOLLRDHUP, [self](std::uint32_t) { self->on_socket(); });
  if (!status.ok()) end(status);
}

void ShmFlow::unwatch() {
  if (!std::exchange(watched_, false)) return;
  loop_.unwatch(segment_->own_wake());
  if (!peer_gone_) loop_.unwatch(socket_.get());
}

void ShmFlow::fail_sends(const Status& status) {
  end_.fail_sends(status);
  for (auto& done : queue_.take_all()) end_.finish(std::move(done), status);
}

void ShmFlow::end(const Status& status) {
  if (state_ == State::closed) return;
  const bool ours = state_ == State::closing;
  state_ = State::closed;
  end_.end(status, ours);
  fail_sends(end_.send_error());
  post_finished();  // keeps the flow alive after the registration has gone
  unwatch();
  socket_.reset();
}

void ShmFlow::post_finished() { end_.post(shared_from_this(), receiver_); }

Status ShmFlow::misfit(std::uint64_t size_bytes) const {
  return {ErrorCode::mismatch,
          concat("message from ", end_.peer_name(), ": a piece of ", size_bytes, " bytes does not fit")};
}

}  // namespace poseidon::shm
