#include "transport/spread/spread_flow.h"

#include <atomic>
#include <utility>

#include "base/invariant.h"
#include "transport/flow_end.h"

namespace poseidon::spread {

/// How the far loop reaches the near end, for as long as that exists.
struct NearEnd {
  std::shared_ptr<LoopGate> gate;
  std::weak_ptr<SpreadFlow> flow;

  void post(std::function<void(SpreadFlow&)> task) const {
    gate->post([flow = flow, task = std::move(task)] {
      if (const auto alive = flow.lock()) task(*alive);
    });
  }
};

/// The far loop's side: it owns the flow beneath and receives from it. A timer of the far loop that never fires keeps
/// it alive from the time when it is that flow's receiver.
class FarEnd final : public Receiver, public std::enable_shared_from_this<FarEnd> {
 public:
  FarEnd(Loop& far, std::shared_ptr<LoopGate> gate, std::shared_ptr<Flow> flow)
      : far_(far), near_{std::move(gate), {}}, flow_(std::move(flow)) {}

  void set_near(const std::shared_ptr<SpreadFlow>& flow) { near_.flow = flow; }
  Flow& flow() { return *flow_; }
  /// Whether the flow coded large payloads when the last message was sent. Any thread.
  bool codes() const { return codes_.load(std::memory_order_relaxed); }

  void start() {
    registration_ = far_.call_at(Clock::time_point::max(), [self = shared_from_this()] {});
    flow_->set_receiver(this);
  }
  void send(const wire::Header& header, Pieces payload, Flow::Done done) {
    codes_.store(flow_->codes(wire::kMaxPayloadBytes), std::memory_order_relaxed);
    // It keeps the near end's address only: a flow that keeps itself alive would outlive its loop.
    flow_->send(header, std::move(payload), [near = near_, done = std::move(done)](const Status& status) {
      near.gate->post([flow = near.flow, done, status] {
        // Also when nobody keeps the near end any more, because the payload's memory is free only then.
        const auto alive = flow.lock();
        alive ? alive->sent(done, status) : done(status);
      });
    });
  }
  void set_place(Result<std::span<std::byte>> place) {
    place_ = std::move(place);
    flow_->resume();
  }

  bool may_receive(Flow&, const wire::Header& header) override {
    if (place_ || header.payload_bytes == 0) return true;
    if (!std::exchange(asked_, true)) near_.post([header](SpreadFlow& flow) { flow.ask_for_place(header); });
    return false;
  }
  Result<std::span<std::byte>> accept(Flow&, const wire::Header& header, bool lent) override {
    if (lent || header.payload_bytes == 0) return std::span<std::byte>();
    asked_ = false;
    invariant(place_.has_value(), "a payload is accepted when its place is known");
    return *std::exchange(place_, std::nullopt);
  }
  Status on_message(Flow&, const wire::Header& header, std::span<const std::byte> payload,
                    std::function<void()> release) override {
    near_.post(
        [header, payload, release = std::move(release)](SpreadFlow& flow) { flow.take(header, payload, release); });
    return {};
  }
  void on_closed(Flow&, const Status& status) override {
    near_.post([status](SpreadFlow& flow) { flow.far_closed(status); });
    const auto self = shared_from_this();
    far_.cancel(std::exchange(registration_, 0));
  }

 private:
  Loop& far_;
  NearEnd near_;
  const std::shared_ptr<Flow> flow_;
  Loop::TimerId registration_ = 0;
  std::atomic<bool> codes_ = false;
  bool asked_ = false;                                 // the near end has been asked for a place
  std::optional<Result<std::span<std::byte>>> place_;  // its answer
};

std::shared_ptr<SpreadFlow> SpreadFlow::make(Loop& near, std::shared_ptr<LoopGate> gate, Loop& far,
                                             std::shared_ptr<Flow> flow) {
  const std::string peer_name = flow->peer_name();
  const std::string key_id = flow->key_id();
  const auto far_end = std::make_shared<FarEnd>(far, std::move(gate), std::move(flow));
  auto made = std::make_shared<SpreadFlow>(near, far, far_end, peer_name);
  made->set_key_id(key_id);
  far_end->set_near(made);
  return made;
}

SpreadFlow::SpreadFlow(Loop& near, Loop& far, std::shared_ptr<FarEnd> far_end, std::string peer_name)
    : near_(near), far_(far), far_end_(std::move(far_end)), peer_name_(std::move(peer_name)) {}

/// Whoever drops the last reference closes the connection. It waits for the far loop, because afterwards the memory of
/// payloads may be gone.
SpreadFlow::~SpreadFlow() {
  far_.call([this] { far_end_->flow().close(std::chrono::milliseconds(0)); });
}

void SpreadFlow::on_far(const std::function<void(FarEnd&)>& task) const {
  near_.check_thread();
  far_.post([far_end = far_end_, task] { task(*far_end); });
}

template <typename Value>
Value SpreadFlow::ask_far(Value (Flow::*method)() const) const {
  near_.check_thread();
  return far_.call([&] { return (far_end_->flow().*method)(); });
}

void SpreadFlow::set_receiver(Receiver* receiver) {
  near_.check_thread();
  invariant(registration_ == 0, "a flow gets its receiver once");
  receiver_ = receiver;
  registration_ = near_.call_at(Clock::time_point::max(), [self = shared_from_this()] {});
  on_far([](FarEnd& far) { far.start(); });
}

void SpreadFlow::send(wire::Header header, Pieces payload, Done done) {
  near_.check_thread();
  ++outstanding_;
  far_.post([far_end = far_end_, header, payload = std::move(payload), done = std::move(done)]() mutable {
    far_end->send(header, std::move(payload), std::move(done));
  });
}

/// Waits for the far loop, because whoever closes a flow may use the memory of what was coming.
void SpreadFlow::close(std::chrono::milliseconds linger) {
  near_.check_thread();
  stopped_ = true;
  far_.call([this, linger] { far_end_->flow().close(linger); });
}

void SpreadFlow::resume() {
  near_.check_thread();
  if (waiting_) near_.post([self = shared_from_this()] { self->give_place(); });
}

Status SpreadFlow::set_traffic_class(const TrafficClass& traffic_class) {
  near_.check_thread();
  return far_.call([&] { return far_end_->flow().set_traffic_class(traffic_class); });
}

bool SpreadFlow::codes(std::size_t /*payload_bytes*/) const { return far_end_->codes(); }
TrafficStats SpreadFlow::traffic() const { return ask_far(&Flow::traffic); }
std::uint64_t SpreadFlow::bytes_delivered() const { return ask_far(&Flow::bytes_delivered); }
Flow::Answer SpreadFlow::answer() const { return ask_far(&Flow::answer); }
Flow::Delivery SpreadFlow::delivery() const { return ask_far(&Flow::delivery); }

void SpreadFlow::limit_rate(std::uint64_t bytes_per_second) {
  on_far([bytes_per_second](FarEnd& far) { far.flow().limit_rate(bytes_per_second); });
}

void SpreadFlow::hold(std::chrono::microseconds time) {
  on_far([time](FarEnd& far) { far.flow().hold(time); });
}

void SpreadFlow::ask_for_place(const wire::Header& header) {
  waiting_ = header;
  give_place();
}

/// Asks the receiver for the memory of the payload that waits, if it may come.
void SpreadFlow::give_place() {
  if (stopped_ || !waiting_ || !receiver_->may_receive(*this, *waiting_)) return;
  const wire::Header header = *std::exchange(waiting_, std::nullopt);
  auto place = receiver_->accept(*this, header, false);
  if (stopped_) return;
  if (Status status = check_place(place, header); !status.ok()) return fail(status);
  on_far([place](FarEnd& far) { far.set_place(place); });
}

/// Takes a whole message. One that needs no place comes unasked.
void SpreadFlow::take(const wire::Header& header, std::span<const std::byte> payload,
                      const std::function<void()>& release) {
  if (stopped_) return;  // destroying `release` gives the memory back
  const bool lent = static_cast<bool>(release);
  if (lent || header.payload_bytes == 0) {
    const auto accepted = receiver_->accept(*this, header, lent);
    if (!accepted.ok()) return fail(accepted.status());
    if (stopped_) return;
  }
  if (Status status = receiver_->on_message(*this, header, payload, release); !status.ok()) fail(status);
}

void SpreadFlow::sent(const Done& done, const Status& status) {
  invariant(outstanding_ > 0, "a send is done once");
  --outstanding_;
  done(status);
  settle();
}

/// The receiver ends the flow.
void SpreadFlow::fail(const Status& status) {
  if (stopped_) return;
  failure_ = status;
  close(std::chrono::milliseconds(0));
}

void SpreadFlow::far_closed(const Status& status) {
  end_ = failure_.ok() ? status : failure_;
  settle();
}

/// Tells the receiver of the end, after what has been sent is done.
void SpreadFlow::settle() {
  if (!end_ || outstanding_ > 0 || receiver_ == nullptr) return;
  stopped_ = true;
  const auto self = shared_from_this();
  std::exchange(receiver_, nullptr)->on_closed(*this, *end_);
  near_.cancel(std::exchange(registration_, 0));
}

}  // namespace poseidon::spread
