#include "transport/tcp/tcp_flow.h"

#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "base/file_descriptor.h"
#include "base/invariant.h"
#include "transport/tcp/address.h"
#include "transport/tcp/congestion_control.h"
#include "transport/tcp/kernel_info.h"
#include "transport/tcp/retransmission.h"
#include "transport/tcp/socket_option.h"

namespace poseidon::tcp {

namespace {

constexpr std::uint32_t kNoRoundTrip = ~0u;  // the kernel's tcpi_min_rtt before the first one
constexpr std::size_t kPiecesPerSend = 512;
// How much one flow reads per wake-up. The limit gives the loop's other flows their turn, and it keeps what has been
// read in the cache until it is processed.
constexpr std::size_t kReadBudgetBytes = 256u << 10;
// Small messages take longer than their bytes suggest. With headers alone, one call's bytes hold twice this many.
constexpr std::uint64_t kReadBudgetMessages = 512;
// How much one call reads. A shorter call holds the socket for less time, and the window opens earlier. CPU time per
// byte, relative to a blocking socket: 0.77 with 64 KiB, 0.92 with 256 KiB (loopback; 0.88 and 1.01 over veth).
constexpr std::size_t kReadPieceBytes = 64u << 10;
constexpr std::size_t kReadLowWaterBytes = 32u << 10;
constexpr std::size_t kWriteBudgetBytes = 256u << 10;
// Shorter payloads travel with others in one call, as they are, unless all have to be coded.
constexpr std::uint64_t kLeastCodedBytes = 8u << 10;
// How much the kernel may hold unsent. The most is little enough to stay in the cache until the card or the peer has
// read it. CPU time per byte over loopback, relative to a blocking socket: 0.97 with 64 KiB, 1.5 with 256 KiB, 1.4 with
// 1 MiB.
constexpr int kMostUnsentBytes = 64 << 10;
// On slow links it is less, because nothing overtakes what the kernel holds. GPT-2 in bf16 with overlap, 8 hosts,
// 31.25 Mb/s: 0.949 of the bound with 64 KiB, 0.974 with 8 KiB.
constexpr int kLeastUnsentBytes = 8 << 10;
// How often the kernel should ask for more. Less often means that it holds too much, more often costs CPU time.
constexpr std::chrono::microseconds kLongestRoomInterval{10'000};
constexpr std::chrono::microseconds kShortestRoomInterval{2'500};

void set_flow_options(int fd) {
  settle_congestion_control(fd);
  shorten_timeout(fd);
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, kMostUnsentBytes);
}

std::size_t total_bytes(std::span<const iovec> pieces) {
  std::size_t total = 0;
  for (const iovec& piece : pieces) total += piece.iov_len;
  return total;
}

}  // namespace

TcpFlow::TcpFlow(Loop& loop, ByteStream stream, std::chrono::milliseconds silence, CodingPolicy coding)
    : loop_(loop),
      stream_(std::move(stream)),
      end_(loop, to_text(peer_address(stream_.socket()))),
      coding_(coding == CodingPolicy::automatic && !leaves_machine(stream_.socket()) ? CodingPolicy::off : coding),
      queue_(loop.coding_choice()),
      unsent_limit_bytes_(kMostUnsentBytes),
      acknowledgements_(stream_.socket(), silence),
      reader_(loop.coding_choice()) {
  set_flow_options(stream_.socket());
}

void TcpFlow::set_receiver(Receiver* receiver) {
  loop_.check_thread();
  invariant(receiver_ == nullptr, "a flow gets its receiver once");
  receiver_ = receiver;
  if (state_ == State::open) {
    update_watch();
    watch_unread();
  } else if (state_ == State::closed) {
    post_finished();
  }
}

void TcpFlow::send(wire::Header header, Pieces payload, Done done) {
  loop_.check_thread();
  if (!end_.may_send(end_.send_error(), state_ == State::open, header, payload, done)) return post_finished();
  const bool is_coded = header.coding != Coding::none;
  if (coding_ != CodingPolicy::off) choose_coding(header);
  const bool idle = !has_unsent();
  queue_.push(header, std::move(payload), std::move(done), is_coded);
  watch_acknowledgements();
  if (!idle || held()) return;  // the rest is sent on EPOLLOUT, or when a timer ends
  flush();
  update_watch();
  if (end_.has_finished()) post_finished();
}

void TcpFlow::choose_coding(wire::Header& header) {
  const bool chooses = coding_ == CodingPolicy::automatic;
  header.prefers_plain = chooses && !loop_.coding_choice().pays();
  if (header.coding != Coding::none || (chooses && header.payload_bytes < kLeastCodedBytes)) return;
  const Coding coding = wire::coding_of(header);
  if (codes(header.payload_bytes))
    header.coding = coding;
  else if (coding != Coding::none)
    loop_.coding_choice().on_plain(header.payload_bytes);
}

bool TcpFlow::codes(std::size_t payload_bytes) const {
  if (coding_ != CodingPolicy::automatic) return coding_ == CodingPolicy::on;
  return payload_bytes >= kLeastCodedBytes && loop_.coding_choice().pays() && !reader_.peer_prefers_plain();
}

Status TcpFlow::set_traffic_class(const TrafficClass& traffic_class) {
  loop_.check_thread();
  if (state_ == State::closed) return {};
  if (traffic_class.shared)
    place_.emplace(stream_.socket(), traffic_class.yields);
  else
    place_.reset();
  const int tos = traffic_class.dscp << 2;  // the low two bits belong to ECN
  const bool v6 = peer_address(stream_.socket()).family() == AF_INET6;
  // A socket for IPv6 may carry IPv4, whose packets have the mark of IPv4.
  const bool marked = try_option(stream_.socket(), IPPROTO_IP, IP_TOS, tos) &&
                      (!v6 || try_option(stream_.socket(), IPPROTO_IPV6, IPV6_TCLASS, tos));
  // Set the priority after the mark, because setting the mark changes the priority, too.
  if (marked && try_option(stream_.socket(), SOL_SOCKET, SO_PRIORITY, traffic_class.socket_priority)) return {};
  return {ErrorCode::refused,
          concat("the system does not permit marking packets with DSCP ", traffic_class.dscp, ": ", errno_text(errno))};
}

void TcpFlow::close(std::chrono::milliseconds linger) {
  loop_.check_thread();
  if (state_ == State::closing && linger.count() <= 0) return end({});
  if (state_ != State::open) return;
  if (held()) loop_.cancel(std::exchange(hold_timer_, 0));
  state_ = State::closing;
  reader_.stop();
  flush();
  if (state_ == State::closed) return;
  if (linger.count() <= 0 || !end_.send_error().ok()) return end({});
  // After the last byte the socket stays open until the peer has closed its side. If the socket had unread data when it
  // was closed, the kernel would throw away what the peer has not received yet.
  end_.linger(linger, [self = shared_from_this()] { self->end({}); });
  update_watch();
  watch_unread();
}

void TcpFlow::on_events(std::uint32_t events) {
  const auto self = shared_from_this();
  const bool failed = (events & (EPOLLERR | EPOLLHUP)) != 0;
  if ((failed || ((events & EPOLLOUT) != 0 && may_flush())) && has_unsent()) {
    adapt_unsent_limit();
    flush();
  }
  end_.run_finished();
  if (failed && reader_.waiting()) end(end_.send_error().ok() ? end_.lost("closed by the peer") : end_.send_error());
  if (state_ != State::closed && (watched_events_ & EPOLLIN) != 0 && (failed || (events & EPOLLIN) != 0)) {
    take_turn();
    update_low_water();
  }
  update_watch();
  watch_unread();
}

TrafficStats TcpFlow::traffic() const {
  loop_.check_thread();
  return {bytes_sent_, bytes_received_, bytes_sent_ + queue_.saved_bytes(), bytes_received_ + reader_.saved_bytes()};
}

std::uint64_t TcpFlow::bytes_delivered() const {
  loop_.check_thread();
  int unacknowledged_bytes = 0;
  if (state_ == State::closed || ::ioctl(stream_.socket(), SIOCOUTQ, &unacknowledged_bytes) != 0) return bytes_sent_;
  return bytes_sent_ - std::min(bytes_sent_, static_cast<std::uint64_t>(unacknowledged_bytes));
}

Flow::Answer TcpFlow::answer() const {
  loop_.check_thread();
  if (state_ == State::closed) return {};
  const tcp_info info = kernel_info(stream_.socket());
  Answer answer;
  answer.round_trip = std::chrono::microseconds(info.tcpi_rtt);
  if (info.tcpi_min_rtt != kNoRoundTrip) answer.least_round_trip = std::chrono::microseconds(info.tcpi_min_rtt);
  if (info.tcpi_unacked > 0) answer.missing = std::chrono::milliseconds(info.tcpi_last_ack_recv);
  return answer;
}

Flow::Delivery TcpFlow::delivery() const {
  loop_.check_thread();
  if (state_ == State::closed) return {};
  const tcp_info info = kernel_info(stream_.socket());
  return {.received_bytes = info.tcpi_bytes_received,
          .packets = std::uint64_t{info.tcpi_data_segs_in} + info.tcpi_data_segs_out,
          .lost_packets = std::uint64_t{info.tcpi_rcv_ooopack} + info.tcpi_total_retrans};
}

void TcpFlow::limit_rate(std::uint64_t bytes_per_second) {
  loop_.check_thread();
  if (state_ == State::closed) return;
  const std::uint64_t value = bytes_per_second == 0 ? ~std::uint64_t{0} : bytes_per_second;
  static_cast<void>(::setsockopt(stream_.socket(), SOL_SOCKET, SO_MAX_PACING_RATE, &value, sizeof(value)));
}

void TcpFlow::hold(std::chrono::microseconds time) {
  loop_.check_thread();
  if (state_ != State::open) return;
  const bool was_held = held();
  if (was_held) loop_.cancel(std::exchange(hold_timer_, 0));
  if (time.count() > 0)
    hold_timer_ = loop_.call_at(Clock::now() + time, [self = shared_from_this()] {
      self->hold_timer_ = 0;
      self->release();
    });
  else if (was_held)
    release();
  update_watch();
}

void TcpFlow::release() {
  last_room_ = {};  // the pause says nothing about the flow's rate
  if (has_unsent()) flush();
  update_watch();
  if (end_.has_finished()) post_finished();
}

void TcpFlow::resume() {
  loop_.check_thread();
  if (reader_.waiting()) loop_.post([self = shared_from_this()] { self->go_on(); });
}

void TcpFlow::go_on() {
  if (state_ != State::open || !reader_.waiting()) return;
  if (Status status = reader_.consume(0, *this, *receiver_); !status.ok()) return end(status);
  if (state_ == State::closed) return;
  update_watch();
  on_events(EPOLLIN);  // data that is in the socket already may cause no event
}

void TcpFlow::on_unread() {
  unread_timer_ = 0;
  on_events(EPOLLIN);
}

/// Runs a turn for data that TLS has taken from the socket already, because it causes no event.
void TcpFlow::watch_unread() {
  if (unread_timer_ != 0 || (watched_events_ & EPOLLIN) == 0 || !stream_.has_unread()) return;
  unread_timer_ = loop_.call_at(Clock::now(), [self = shared_from_this()] { self->on_unread(); });
}

void TcpFlow::watch_acknowledgements() {
  if (acknowledgement_timer_ != 0 || acknowledgements_.interval().count() <= 0) return;
  acknowledgement_timer_ = loop_.call_at(Clock::now() + acknowledgements_.interval(), [self = shared_from_this()] {
    self->acknowledgement_timer_ = 0;
    switch (self->acknowledgements_.look(self->stream_.socket())) {
      case AcknowledgementWatch::Finding::idle:
        return;
      case AcknowledgementWatch::Finding::waiting:
        return self->watch_acknowledgements();
      case AcknowledgementWatch::Finding::lost:
        return self->end(self->end_.lost(errno_text(ETIMEDOUT)));
    }
  });
}

void TcpFlow::note_under_way() {
  const bool under_way =
      state_ != State::closed && coding_ != CodingPolicy::off && (!queue_.empty() || reader_.in_payload());
  if (std::exchange(under_way_, under_way) == under_way) return;
  CodingChoice& choice = loop_.coding_choice();
  under_way ? choice.begin_message() : choice.end_message();
}

void TcpFlow::update_watch() {
  note_under_way();
  if (state_ == State::closed) return;
  std::uint32_t wanted = 0;
  // While nothing may be read, the flow waits only for failures. Their event comes in any case.
  if (receiver_ != nullptr || state_ == State::closing) wanted |= reader_.waiting() ? EPOLLERR : EPOLLIN;
  if (has_unsent() && may_flush()) wanted |= EPOLLOUT;
  if (wanted == watched_events_) return;
  Status status;
  if (watched_events_ == 0) {
    status = loop_.watch(stream_.socket(), wanted,
                         [self = shared_from_this()](std::uint32_t events) { self->on_events(events); });
  } else if (wanted == 0) {
    loop_.unwatch(stream_.socket());
  } else {
    status = loop_.rewatch(stream_.socket(), wanted);
  }
  if (!status.ok()) return end(status);
  watched_events_ = wanted;
}

/// Follows the rate of the flow: the kernel asks for more when it has sent half of what it may hold.
void TcpFlow::adapt_unsent_limit() {
  const Clock::time_point now = Clock::now();
  const Clock::time_point last = std::exchange(last_room_, now);
  if (last == Clock::time_point{}) return;
  int wanted = unsent_limit_bytes_;
  if (now - last > kLongestRoomInterval) wanted = std::max(wanted / 2, kLeastUnsentBytes);
  if (now - last < kShortestRoomInterval) wanted = std::min(wanted * 2, kMostUnsentBytes);
  limit_unsent(wanted);
}

void TcpFlow::limit_unsent(int bytes) {
  if (std::exchange(unsent_limit_bytes_, bytes) != bytes)
    set_option(stream_.socket(), IPPROTO_TCP, TCP_NOTSENT_LOWAT, bytes);
}

void TcpFlow::flush() {
  std::size_t budget_bytes = room();
  if (budget_bytes == 0) return wait_for_room();
  while (has_unsent() && budget_bytes > 0) {
    std::array<iovec, kPiecesPerSend> pieces{};
    const auto used = std::span(pieces).first(queue_.fill(pieces, budget_bytes));
    const Transfer sent = stream_.send(used);
    if (sent.outcome == Transfer::Outcome::blocked) break;
    if (sent.outcome == Transfer::Outcome::failed) return fail_sends(end_.lost(stream_.failure()));
    bytes_sent_ += sent.bytes;
    budget_bytes -= sent.bytes;
    if (place_) place_->add(sent.bytes);
    std::vector<SendQueue::Done> complete;
    queue_.advance(sent.bytes, complete);
    for (auto& done : complete) end_.finish(std::move(done), Status());
    if (sent.bytes < total_bytes(used)) break;  // the next try would only return EAGAIN
  }
  if (!has_unsent()) last_room_ = {};
  if (state_ == State::closing && queue_.empty() && !end_of_stream_sent_) end_of_stream_sent_ = stream_.finish();
}

/// How much one flush may send.
std::size_t TcpFlow::room() const {
  return place_ && has_unsent() ? std::min(place_->room(), kWriteBudgetBytes) : kWriteBudgetBytes;
}

void TcpFlow::wait_for_room() {
  if (room_timer_ != 0) return;
  limit_unsent(kLeastUnsentBytes);  // what the kernel holds enters the host's queue without asking
  last_room_ = {};                  // the pause says nothing about the flow's rate
  room_timer_ = loop_.call_at(Clock::now() + HostQueue::kPause, [self = shared_from_this()] {
    self->room_timer_ = 0;
    if (!self->held()) self->release();
  });
}

void TcpFlow::fail_sends(const Status& status) {
  end_.fail_sends(status);
  for (auto& done : queue_.take_all()) end_.finish(std::move(done), status);
  if (state_ == State::closing) return end({});
  // What the peer sent before it closed (perhaps why it did) can still be read. After it comes the end of the stream.
  ::shutdown(stream_.socket(), SHUT_RDWR);
}

void TcpFlow::take_turn() {
  Receiver* const receiver = receiver_;  // it is told of the end later
  if (receiver == nullptr || state_ != State::open) return receive();
  if (!receiver->begin_turn(*this)) return;
  receive();
  receiver->end_turn(*this);
}

void TcpFlow::receive() {
  std::size_t budget_bytes = kReadBudgetBytes;
  const std::uint64_t last_message = reader_.message_count() + kReadBudgetMessages;
  while (state_ != State::closed && !reader_.waiting() && budget_bytes > 0 && reader_.message_count() < last_message) {
    std::array<iovec, 2> pieces{};
    const auto used = std::span(pieces).first(reader_.destinations(std::min(budget_bytes, kReadPieceBytes), pieces));
    const Transfer got = stream_.receive(used);
    if (got.outcome == Transfer::Outcome::blocked) return;
    if (got.outcome != Transfer::Outcome::done) return on_read_end(got.outcome);
    const bool drained = got.bytes < total_bytes(used);
    bytes_received_ += got.bytes;
    budget_bytes -= got.bytes;
    if (state_ == State::open) {
      if (Status status = reader_.consume(got.bytes, *this, *receiver_); !status.ok()) return end(status);
    }
    if (drained) return;
  }
}

/// On a link that is slower than this loop, packets come one by one, and waking up for each costs more than it brings.
/// So the socket waits for a large part of the payload, or for its end.
void TcpFlow::update_low_water() {
  if (stream_.encrypted()) return;  // TLS may already hold a part of what is wanted, as a part of a record
  const std::size_t wanted = std::clamp<std::size_t>(reader_.wanted_bytes(), 1, kReadLowWaterBytes);
  if (state_ != State::open || wanted == low_water_bytes_) return;
  low_water_bytes_ = wanted;
  set_option(stream_.socket(), SOL_SOCKET, SO_RCVLOWAT, static_cast<int>(wanted));
}

void TcpFlow::on_read_end(Transfer::Outcome outcome) {
  if (!end_.send_error().ok()) return end(end_.send_error());
  if (outcome == Transfer::Outcome::failed) return end(end_.lost(stream_.failure()));
  end(end_.lost(reader_.between_messages() ? "closed by the peer" : "closed by the peer in the middle of a message"));
}

void TcpFlow::end(const Status& status) {
  if (state_ == State::closed) return;
  const bool ours = state_ == State::closing;
  state_ = State::closed;
  note_under_way();
  reader_.stop();
  end_.end(status, ours);
  for (auto& done : queue_.take_all()) end_.finish(std::move(done), end_.send_error());
  post_finished();  // keeps the flow alive after the registration has gone
  if (watched_events_ != 0) loop_.unwatch(stream_.socket());
  watched_events_ = 0;
  if (held()) loop_.cancel(std::exchange(hold_timer_, 0));
  place_.reset();
  for (Loop::TimerId* timer : {&unread_timer_, &acknowledgement_timer_, &room_timer_})
    if (*timer != 0) loop_.cancel(std::exchange(*timer, 0));
  stream_.close();
}

void TcpFlow::post_finished() { end_.post(shared_from_this(), receiver_); }

}  // namespace poseidon::tcp
