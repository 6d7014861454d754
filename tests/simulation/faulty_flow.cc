#include "simulation/faulty_flow.h"

#include <algorithm>
#include <cstring>

#include "base/crc32c.h"
#include "base/invariant.h"
#include "simulation/simulated_world.h"
#include "transport/coded_payload.h"
#include "transport/flow_end.h"

namespace poseidon::testing {

namespace {

using std::chrono::milliseconds;

// Which detail of a draw is asked for.
enum : std::uint64_t { kDelay = 1, kSplit, kSplitAt, kEnd, kCoded };

constexpr std::size_t kSplitBytes = 64;  // smaller payloads come in one piece

/// The payload as it is after it has travelled coded.
std::vector<std::byte> coded_and_decoded(Coding coding, std::span<const std::byte> payload) {
  CodedPayload sent(coding, {payload});
  std::vector<std::byte> room(kSegmentRoomBytes);
  std::vector<std::byte> values(payload.size());
  for (auto left = std::span(values); !sent.empty();) {
    const auto place = left.first(std::min(left.size(), kSegmentBytes));
    invariant(decode_segment(coding, sent.next(room), place).ok(), "what is coded can be decoded");
    left = left.subspan(place.size());
  }
  return values;
}

}  // namespace

FaultyFlow::FaultyFlow(Loop& loop, std::shared_ptr<Flow> medium, Wire wire)
    : loop_(loop),
      medium_(std::move(medium)),
      wire_(std::move(wire)),
      send_key_(mix(wire_.network->settings().seed, wire_.connection + " sent by " + wire_.own->name)),
      arrival_key_(mix(wire_.network->settings().seed, wire_.connection + " arrives at " + wire_.own->name)) {}

FaultyFlow::~FaultyFlow() { wire_.network->forget(this); }

void FaultyFlow::set_receiver(Receiver* receiver) {
  receiver_ = receiver;
  update_registration();
  if (!finished_) {
    medium_heard_ = true;
    return medium_->set_receiver(this);
  }
  loop_.post([self = shared_from_this()] {  // lost before it had a receiver
    if (self->receiver_ != nullptr) std::exchange(self->receiver_, nullptr)->on_closed(*self, self->end_status_);
    self->update_registration();
  });
}

/// A payload that the medium lends to the other end. This end may lose the connection, and even its process end, while
/// the other one still reads: what has not come back by then stays with the network.
class FaultyFlow::Lent {
 public:
  Lent(std::shared_ptr<FaultyNetwork> network, std::vector<std::byte> bytes)
      : network_(std::move(network)), bytes_(std::move(bytes)) {}
  ~Lent() {
    if (!came_back_) network_->keep(std::move(bytes_));
  }
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }
  void come_back() { came_back_ = true; }

 private:
  const std::shared_ptr<FaultyNetwork> network_;
  std::vector<std::byte> bytes_;
  bool came_back_ = false;
};

bool FaultyFlow::survives_sending() {
  FaultyNetwork& network = *wire_.network;
  const Draw drawn = network.draw_fault(send_key_, sent_count_, {Fault::kill, Fault::replace, Fault::half_cut});
  if (!drawn.fault) return !wire_.own->dead;
  const std::string where = wire_.connection + " at message " + std::to_string(sent_count_) + " of " + wire_.own->name;
  network.strike(wire_.own, drawn, where);
  if (wire_.own->dead) return false;  // its flows end in tasks of their own
  if (drawn.fault != Fault::half_cut) return true;
  network.note(Fault::half_cut, where);
  loop_.post([self = shared_from_this()] { self->lose("half cut", false); });
  return false;
}

void FaultyFlow::send(wire::Header header, std::vector<std::span<const std::byte>> payload, Done done) {
  if (Status refusal = check_send(end_status_, open_, peer_name(), header, payload); !refusal.ok())
    return loop_.post([done = std::move(done), refusal] { done(refusal); });
  const std::uint64_t id = ++sent_count_;
  outstanding_.emplace(id, std::move(done));
  if (!survives_sending()) return;  // the flow's end completes it
  std::vector<std::byte> copy;
  copy.reserve(header.payload_bytes);
  for (const auto& piece : payload) copy.insert(copy.end(), piece.begin(), piece.end());
  const auto lent = std::make_shared<Lent>(wire_.network, std::move(copy));
  medium_->send(header, {lent->bytes()}, [weak = weak_from_this(), id, lent](const Status& status) {
    lent->come_back();
    if (const auto self = weak.lock()) self->complete(id, status);
  });
}

void FaultyFlow::complete(std::uint64_t id, const Status& status) {
  const auto entry = outstanding_.extract(id);
  if (!entry.empty()) entry.mapped()(status);
}

void FaultyFlow::close(milliseconds) {
  if (!open_) return;
  open_ = false;
  drop_arrivals();
  medium_->close(milliseconds(0));
  if (medium_ended_) loop_.post([self = shared_from_this()] { self->finish(); });
}

/// The receiver did not take what came.
void FaultyFlow::refuse(const Status& status) {
  if (!open_) return;
  close(milliseconds(0));
  end_status_ = status;
}

void FaultyFlow::lose(const std::string& why, bool tell_peer) {
  if (finished_) return;
  const auto self = shared_from_this();
  open_ = false;
  end_status_ = {ErrorCode::peer_lost, "connection to " + peer_name() + " ended (" + why + ")"};
  finish();
  if (tell_peer) medium_->close(milliseconds(0));
}

/// The last step at this end. The medium may go on.
void FaultyFlow::finish() {
  if (std::exchange(finished_, true)) return;
  const auto self = shared_from_this();
  open_ = false;
  drop_arrivals();
  const Status closed(ErrorCode::shut_down, "connection to " + peer_name() + " was closed before this was sent");
  for (const auto& [id, done] : std::exchange(outstanding_, {})) done(end_status_.ok() ? closed : end_status_);
  if (receiver_ != nullptr) std::exchange(receiver_, nullptr)->on_closed(*this, end_status_);
  update_registration();
}

void FaultyFlow::drop_arrivals() {
  arrivals_.clear();
  partial_.reset();
}

void FaultyFlow::update_registration() {
  const bool wanted = receiver_ != nullptr || (medium_heard_ && !medium_ended_);
  if (wanted && registration_ == 0) {
    registration_ = loop_.call_at(Clock::time_point::max(), [self = shared_from_this()] {});
  } else if (!wanted && registration_ != 0) {
    loop_.cancel(std::exchange(registration_, 0));
  }
}

Result<std::span<std::byte>> FaultyFlow::accept(Flow&, const wire::Header& header, bool lent) {
  if (!lent && header.payload_bytes > 0) return Status(ErrorCode::invalid_argument, "the medium lends every payload");
  return std::span<std::byte>();
}

Status FaultyFlow::on_message(Flow&, const wire::Header& header, std::span<const std::byte> payload,
                              std::function<void()> release) {
  Arrival arrival{header, {payload.begin(), payload.end()}, 0, false, std::nullopt};
  const Coding coding = wire::coding_of(header);
  if (coding != Coding::none && mix(mix(arrival_key_, kCoded), arrived_count_) % 2 == 0)
    arrival.payload = coded_and_decoded(coding, payload);
  if (release) release();
  if (open_) arrive(std::move(arrival));  // an end that has lost the connection hears nothing
  return {};
}

void FaultyFlow::on_closed(Flow&, const Status& status) {
  const auto self = shared_from_this();
  medium_ended_ = true;
  if (finished_) return update_registration();
  if (!open_) return finish();
  // What was sent before arrives before; and no word of the end crosses a partition.
  const auto blockade = wire_.network->blockade(*wire_.peer, *wire_.own);
  Arrival end;
  end.end = status;
  enqueue(std::move(end), std::max(last_due_, blockade ? blockade->until : Clock::now()));
  pump();
}

/// A message is at this end: what it suffers.
void FaultyFlow::arrive(Arrival arrival) {
  FaultyNetwork& network = *wire_.network;
  const std::uint64_t number = ++arrived_count_;
  const Draw drawn = network.draw_fault(
      arrival_key_, number,
      {Fault::drop, Fault::delay, Fault::duplicate, Fault::reorder, Fault::cut, Fault::half_cut, Fault::partition});
  if (drawn.fault) {
    const std::string where = wire_.connection + " at message " + std::to_string(number) + " to " + wire_.own->name;
    if (drawn.fault == Fault::partition)
      network.part_at_random(drawn, where);
    else
      network.note(*drawn.fault, where);
  }
  const auto blockade = network.blockade(*wire_.peer, *wire_.own);
  if (drawn.fault == Fault::drop || (blockade && blockade->lossy)) return;
  if (drawn.fault == Fault::half_cut) return lose("half cut", false);

  const std::size_t size = arrival.payload.size();
  if (size >= kSplitBytes && drawn.below(4, kSplit) == 0) arrival.first_bytes = 1 + drawn.below(size - 1, kSplitAt);
  arrival.cut = drawn.fault == Fault::cut;
  const auto now = Clock::now();
  auto due = std::max(last_due_, blockade ? blockade->until : now);
  const milliseconds later(1 +
                           drawn.below(static_cast<std::uint64_t>(network.settings().longest_delay.count()), kDelay));
  if (drawn.fault == Fault::duplicate) enqueue(arrival, due + later);
  if (drawn.fault == Fault::delay || drawn.fault == Fault::reorder) due += later;
  if (drawn.fault != Fault::reorder) last_due_ = due;
  enqueue(std::move(arrival), due);
  pump();
}

void FaultyFlow::enqueue(Arrival arrival, Clock::time_point due) {
  arrivals_.emplace(std::pair(due, ++queued_count_), std::move(arrival));
}

void FaultyFlow::resume() {
  if (std::exchange(waiting_, false)) loop_.post([self = shared_from_this()] { self->pump(); });
}

/// Delivers what is due.
void FaultyFlow::pump() {
  const auto self = shared_from_this();
  if (timer_ != 0) loop_.cancel(std::exchange(timer_, 0));
  while (receiver_ != nullptr && !partial_ && !arrivals_.empty() && arrivals_.begin()->first.first <= Clock::now()) {
    const wire::Header& next = arrivals_.begin()->second.header;
    waiting_ = next.payload_bytes > 0 && !receiver_->may_receive(*this, next);
    if (waiting_ || !open_) return;
    Arrival arrival = std::move(arrivals_.begin()->second);
    arrivals_.erase(arrivals_.begin());
    if (arrival.end) {
      end_status_ = *arrival.end;
      return finish();
    }
    deliver(std::move(arrival));
  }
  if (partial_ || arrivals_.empty()) return;
  timer_ = loop_.call_at(arrivals_.begin()->first.first, [weak = weak_from_this()] {
    const auto flow = weak.lock();
    if (!flow) return;
    flow->timer_ = 0;
    flow->pump();
  });
}

void FaultyFlow::note_delivery(const Arrival& arrival) const {
  const std::uint32_t digest = crc32c(arrival.payload);
  note_in_trace(wire_.connection + " brings " + std::to_string(static_cast<int>(arrival.header.kind)) + " of " +
                std::to_string(arrival.payload.size()) + " bytes " + std::to_string(digest) + " to " + wire_.own->name);
}

void FaultyFlow::deliver(Arrival arrival) {
  if (arrival.cut && arrival.first_bytes == 0) return lose("cut", true);
  note_delivery(arrival);
  auto place = receiver_->accept(*this, arrival.header, false);
  if (!open_) return;
  if (place.ok() && place.value().size() != arrival.payload.size())
    place =
        Status(ErrorCode::invalid_argument, "the receiver gave " + std::to_string(place.value().size()) +
                                                " bytes for a payload of " + std::to_string(arrival.payload.size()));
  if (!place.ok()) return refuse(place.status());
  if (arrival.payload.empty()) {
    if (Status status = receiver_->on_message(*this, arrival.header, {}, {}); !status.ok()) refuse(status);
    return;
  }
  partial_ = Partial{std::move(arrival), place.value()};
  const std::size_t first_bytes = partial_->arrival.first_bytes;
  if (first_bytes == 0) return deliver_rest();
  std::memcpy(place.value().data(), partial_->arrival.payload.data(), first_bytes);
  receiver_->on_progress(*this, partial_->arrival.header, first_bytes);
  if (!open_) return;
  if (partial_->arrival.cut) return lose("cut in the middle of a message", true);
  loop_.post([weak = weak_from_this()] {
    const auto self = weak.lock();
    if (!self || !self->partial_) return;
    self->deliver_rest();
    self->pump();
  });
}

void FaultyFlow::deliver_rest() {
  const Partial partial = std::move(*partial_);
  partial_.reset();
  const std::size_t first_bytes = partial.arrival.first_bytes;
  const auto& payload = partial.arrival.payload;
  std::memcpy(partial.place.data() + first_bytes, payload.data() + first_bytes, payload.size() - first_bytes);
  if (Status status = receiver_->on_message(*this, partial.arrival.header, partial.place, {}); !status.ok())
    refuse(status);
}

}  // namespace poseidon::testing
