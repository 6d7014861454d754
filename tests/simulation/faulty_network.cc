#include "simulation/faulty_network.h"

#include <algorithm>
#include <tuple>

#include "simulation/faulty_flow.h"
#include "transport/inproc/inproc_flow.h"

namespace poseidon::testing {

namespace {

using std::chrono::milliseconds;

// Which detail of a partition is asked for.
enum : std::uint64_t { kGroup = 11, kDirection, kLossy, kDuration, kCutOff };

constexpr milliseconds kRetryPause{5};
constexpr milliseconds kShortestPartition{5};

bool has(std::uint32_t slots, int slot) { return (slots >> slot & 1) != 0; }

std::string names_of(std::uint32_t slots) {
  std::string names;
  for (int slot = 0; slot < 32; ++slot)
    if (has(slots, slot)) names += (names.empty() ? "" : "+") + std::to_string(slot);
  return names;
}

/// One connect(): asks again until the deadline. Kept alive by the timer; loop thread only.
class Connector : public std::enable_shared_from_this<Connector> {
 public:
  using Done = std::function<void(Result<std::shared_ptr<Flow>>)>;

  Connector(std::shared_ptr<FaultyNetwork> network, std::shared_ptr<Node> node, Loop& loop, std::string address,
            Clock::time_point deadline, Done done)
      : network_(std::move(network)),
        node_(std::move(node)),
        loop_(loop),
        address_(std::move(address)),
        connection_(network_->connection_name(*node_, address_)),
        deadline_(deadline),
        done_(std::move(done)) {}

  void ask() {
    if (auto flow = network_->try_connect(node_, loop_, address_, connection_, ++attempts_)) return done_(flow);
    const auto now = Clock::now();
    if (node_->dead || now >= deadline_)
      return done_(Status(ErrorCode::unreachable, "cannot connect to " + address_ + ": nobody listens there"));
    loop_.call_at(std::min(deadline_, now + kRetryPause), [self = shared_from_this()] { self->ask(); });
  }

 private:
  const std::shared_ptr<FaultyNetwork> network_;
  const std::shared_ptr<Node> node_;
  Loop& loop_;
  const std::string address_;
  const std::string connection_;
  const Clock::time_point deadline_;
  const Done done_;
  std::uint64_t attempts_ = 0;
};

class FaultyListener final : public Listener {
 public:
  FaultyListener(std::shared_ptr<FaultyNetwork> network, Loop& loop, std::string address,
                 std::shared_ptr<FaultyNetwork::OnAccept> on_accept)
      : network_(std::move(network)), loop_(loop), address_(std::move(address)), on_accept_(std::move(on_accept)) {}
  ~FaultyListener() override {
    network_->stop_listening(address_);
    loop_.call([this] { on_accept_.reset(); });
  }
  const std::string& address() const override { return address_; }

 private:
  const std::shared_ptr<FaultyNetwork> network_;
  Loop& loop_;
  const std::string address_;
  std::shared_ptr<FaultyNetwork::OnAccept> on_accept_;  // dropped on the loop: from then on nothing is accepted
};

class FaultyTransport final : public Transport {
 public:
  FaultyTransport(std::shared_ptr<FaultyNetwork> network, std::shared_ptr<Node> node)
      : network_(std::move(network)), node_(std::move(node)) {}

  Result<std::unique_ptr<Listener>> listen(Loop& loop, const std::string& address,
                                           FaultyNetwork::OnAccept on_accept) override {
    auto shared = std::make_shared<FaultyNetwork::OnAccept>(std::move(on_accept));
    auto name = network_->listen(node_, loop, address, shared);
    if (!name.ok()) return name.status();
    return Result<std::unique_ptr<Listener>>(
        std::make_unique<FaultyListener>(network_, loop, std::move(name.value()), std::move(shared)));
  }

  void connect(Loop& loop, const std::string& address, Clock::time_point deadline, Connector::Done done) override {
    auto connector = std::make_shared<Connector>(network_, node_, loop, address, deadline, std::move(done));
    loop.post([connector] { connector->ask(); });
  }

 private:
  const std::shared_ptr<FaultyNetwork> network_;
  const std::shared_ptr<Node> node_;
};

}  // namespace

std::shared_ptr<Node> FaultyNetwork::add_node(int slot, bool may_be_replaced) {
  const std::lock_guard lock(mutex_);
  return std::make_shared<Node>(slot, incarnations_[slot]++, may_be_replaced);
}

std::unique_ptr<Transport> FaultyNetwork::transport(std::shared_ptr<Node> node) {
  return std::make_unique<FaultyTransport>(shared_from_this(), std::move(node));
}

void FaultyNetwork::kill(const std::shared_ptr<Node>& node, const std::string& where) {
  // Their loops are there as long as the lock is held: a flow is forgotten before its loop goes.
  const std::lock_guard lock(mutex_);
  if (node->dead.exchange(true)) return;
  note(Fault::kill, where);
  for (const auto& [key, open] : flows_) {
    if (open.node != node) continue;
    open.loop->post([weak = open.flow] {
      if (const auto flow = weak.lock()) flow->lose("killed", true);
    });
  }
}

void FaultyNetwork::strike(const std::shared_ptr<Node>& node, const Draw& draw, const std::string& where) {
  if (draw.fault == Fault::kill) kill(node, where);
  if (draw.fault != Fault::replace || node->replaced || node->dead) return;
  if (!node->may_be_replaced) return kill(node, where);
  const auto longest = static_cast<std::uint64_t>(settings_.longest_partition.count());
  const milliseconds duration(draw.below(2 * longest + 1, kCutOff));
  note(Fault::replace, node->name + ", cut off for " + std::to_string(duration.count()) + " ms, " + where);
  node->cut_off_until_ns = now_ns() + std::chrono::nanoseconds(duration).count();
  node->replaced = true;
}

void FaultyNetwork::part(std::uint32_t from_slots, std::uint32_t to_slots, bool both_ways, bool lossy,
                         milliseconds duration) {
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  std::erase_if(partitions_, [now](const Partition& old) { return old.blockade.until <= now; });
  partitions_.push_back({from_slots, to_slots, {now + duration, lossy}});
  if (both_ways) partitions_.push_back({to_slots, from_slots, {now + duration, lossy}});
}

void FaultyNetwork::part_at_random(const Draw& draw, const std::string& where) {
  std::uint32_t all = 0;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [slot, count] : incarnations_) all |= 1u << slot;
  }
  const auto group = static_cast<std::uint32_t>(1 + draw.below(all > 1 ? all - 1 : 1, kGroup)) & all;
  const auto others = all & ~group;
  const std::uint64_t direction = draw.below(3, kDirection);
  const bool lossy = draw.below(2, kLossy) == 0;
  const auto duration =
      kShortestPartition +
      milliseconds(draw.below(static_cast<std::uint64_t>(settings_.longest_partition.count()), kDuration));
  part(direction == 1 ? others : group, direction == 1 ? group : others, direction == 2, lossy, duration);
  note(Fault::partition, names_of(direction == 1 ? others : group) + (direction == 2 ? " <-> " : " -> ") +
                             names_of(direction == 1 ? group : others) + " for " + std::to_string(duration.count()) +
                             " ms, " + (lossy ? "lossy" : "holding back") + ", " + where);
}

void FaultyNetwork::calm() {
  calm_ = true;
  const std::lock_guard lock(mutex_);
  partitions_.clear();
}

Draw FaultyNetwork::draw_fault(std::uint64_t key, std::uint64_t number, std::initializer_list<Fault> possible) const {
  Draw drawn = draw(settings_.rates, key, number, possible);
  if (calm_) drawn.fault.reset();
  return drawn;
}

std::optional<FaultyNetwork::Blockade> FaultyNetwork::blockade(const Node& from, const Node& to) const {
  const std::lock_guard lock(mutex_);
  return blockade_locked(from, to);
}

std::optional<FaultyNetwork::Blockade> FaultyNetwork::blockade_locked(const Node& from, const Node& to) const {
  if (&from == &to || calm_) return std::nullopt;
  const std::int64_t left_ns = std::max<std::int64_t>(from.cut_off_until_ns, to.cut_off_until_ns) - now_ns();
  const auto now = Clock::now();
  std::optional<Blockade> longest;
  if (left_ns > 0) longest = Blockade{now + std::chrono::nanoseconds(left_ns), false};
  for (const Partition& partition : partitions_) {
    if (!has(partition.from_slots, from.slot) || !has(partition.to_slots, to.slot)) continue;
    if (partition.blockade.until > now && (!longest || partition.blockade.until > longest->until))
      longest = partition.blockade;
  }
  return longest;
}

Result<std::string> FaultyNetwork::listen(const std::shared_ptr<Node>& node, Loop& loop, const std::string& address,
                                          const std::shared_ptr<OnAccept>& on_accept) {
  const std::lock_guard lock(mutex_);
  std::string name = address;
  for (int port = 1; name.ends_with(":0") || (name != address && acceptors_.contains(name)); ++port)
    name = "s" + std::to_string(node->slot) + ":" + std::to_string(port);
  if (!acceptors_.try_emplace(name, Acceptor{node, loop, on_accept}).second)
    return Status(ErrorCode::unreachable, "cannot listen on " + name + ": Address already in use");
  return name;
}

void FaultyNetwork::stop_listening(const std::string& address) {
  const std::lock_guard lock(mutex_);
  acceptors_.erase(address);
}

std::string FaultyNetwork::connection_name(const Node& from, const std::string& address) {
  const std::string between = from.name + " -> " + address;
  const std::lock_guard lock(mutex_);
  return between + " #" + std::to_string(++connections_[between]);
}

std::shared_ptr<Flow> FaultyNetwork::try_connect(const std::shared_ptr<Node>& from, Loop& loop,
                                                 const std::string& address, const std::string& connection,
                                                 std::uint64_t attempt) {
  const Draw drawn =
      draw_fault(mix(settings_.seed, connection + " connects"), attempt, {Fault::refusal, Fault::kill, Fault::replace});
  strike(from, drawn, connection + " connecting");
  // The listener's loop is there as long as the lock is held: it stops listening before its loop goes.
  const std::lock_guard lock(mutex_);
  const auto found = acceptors_.find(address);
  if (found == acceptors_.end() || from->dead) return nullptr;
  const Acceptor& acceptor = found->second;
  const Node& to = *acceptor.node;
  if (to.dead || apart_locked(*from, to)) return nullptr;
  if (drawn.fault == Fault::refusal) {
    note(Fault::refusal, connection + " in attempt " + std::to_string(attempt));
    return nullptr;
  }
  auto [ours, theirs] = inproc::InprocFlow::make_pair(loop, address, acceptor.loop, connection);
  const auto self = shared_from_this();
  auto first = add_flow_locked(
      std::make_shared<FaultyFlow>(loop, std::move(ours), Wire{self, connection, from, acceptor.node}), loop, from);
  auto second = add_flow_locked(
      std::make_shared<FaultyFlow>(acceptor.loop, std::move(theirs), Wire{self, connection, acceptor.node, from}),
      acceptor.loop, acceptor.node);
  acceptor.loop.post([weak = acceptor.on_accept, flow = std::move(second)]() mutable {
    const auto accepted = std::move(flow);
    if (const auto on_accept = weak.lock()) (*on_accept)(accepted);
  });
  return first;
}

std::shared_ptr<FaultyFlow> FaultyNetwork::add_flow_locked(std::shared_ptr<FaultyFlow> flow, Loop& loop,
                                                           const std::shared_ptr<Node>& node) {
  flows_[flow.get()] = {flow, node, &loop};
  return flow;
}

void FaultyNetwork::forget(const FaultyFlow* flow) {
  const std::lock_guard lock(mutex_);
  flows_.extract(flow);
}

void FaultyNetwork::keep(std::vector<std::byte> payload) {
  const std::lock_guard lock(mutex_);
  kept_.push_back(std::move(payload));
}

}  // namespace poseidon::testing
