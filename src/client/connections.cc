// The connections of a client to servers and peers: connecting, greeting, checking and naming them.
#include "client/connections.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "base/host.h"
#include "base/invariant.h"
#include "plan/mesh.h"
#include "plan/partition.h"
#include "transport/traffic_class.h"
#include "wire/messages/ending.h"
#include "wire/messages/life.h"

namespace poseidon {

namespace {
constexpr auto kShortestPatience = std::chrono::milliseconds(1000);
constexpr auto kHelloPatience = std::chrono::seconds(5);
constexpr std::int64_t kLeastRedialMs = 50;
constexpr std::int64_t kMostRedialMs = 500;

/// Returns how long to try to connect. It is a bit shorter than the wait for it, because only the connector can say why
/// it failed.
std::chrono::milliseconds patience_to_link(const Options& options, bool is_listening) {
  const auto most = options.timeout * 9 / 10;
  if (options.on_failure == OnFailure::abort || !is_listening) return most;
  // A process publishes its address after it listens. If it refuses connections now, it has died, and the job forms
  // another generation without it.
  return std::min(most, std::max(options.timeout / 20, kShortestPatience));
}

/// Returns the part of an address that belongs to one of several transports.
std::string part_of(const std::string& address, std::size_t index) {
  std::istringstream parts(address);
  std::string part;
  for (std::size_t i = 0; i <= index; ++i) std::getline(parts, part, '|');
  return part;
}

}  // namespace

Connections::Connections(const Options& options, const Cluster& cluster, Receiver& receiver, Callbacks callbacks,
                         std::shared_ptr<Loop> loop, std::unique_ptr<Lobby> lobby, Executor& executor)
    : options_(options),
      colocated_(cluster.placement == Placement::colocated),
      connects_all_servers_(options.world_size <= static_cast<int>(kFullMesh) || !options.checkpoint_dir.empty()),
      host_(host_name()),
      receiver_(receiver),
      callbacks_(std::move(callbacks)),
      loop_(std::move(loop)),
      lobby_(std::move(lobby)),
      jitter_(static_cast<std::uint32_t>(options.rank) + 1) {
  links_.rank = static_cast<std::uint32_t>(options.rank);
  links_.worker_count = static_cast<std::uint32_t>(options.world_size);
  links_.flow_count = static_cast<std::size_t>(options.flows);
  links_.class_count = static_cast<std::size_t>(options.priority_classes);
  links_.priorities = PriorityMap(options.priority_classes);
  links_.by_worker = options.assignment == Assignment::worker;
  links_.servers.resize(static_cast<std::size_t>(cluster.server_count));
  links_.server_is_local.resize(links_.servers.size(), false);
  // Colocated servers do not need it: there pushes and results share each direction of a port. Nor do servers that
  // answer a push without waiting for the others.
  if (!colocated_ && links_.worker_count > 1 && options.consistency == Consistency::bsp)
    for (std::size_t i = 0; i < links_.servers.size(); ++i)
      links_.push_windows.push_back(std::make_unique<PushWindow>(*loop_, window_bytes(options.world_size)));
  links_.peers.resize(links_.worker_count);
  links_.hosts = Hosts(cluster);
  links_.loop = loop_.get();
  links_.executor = &executor;
  links_.pool = std::make_shared<BufferPool>();
  links_.recorder = &recorder_;
}

void Connections::connect(Endpoints endpoints) {
  loop_->check_other_thread();
  std::map<std::size_t, Endpoints::ServerEndpoint> dedicated;
  for (std::size_t i = 0; i < endpoints.servers.size(); ++i)
    if (endpoints.servers[i].dedicated) dedicated.emplace(i, endpoints.servers[i]);
  loop_->call([this, &endpoints] {
    endpoints_ = std::move(endpoints);
    peer_deadline_ = Clock::now() + patience_to_link(options_, true);
    // Dedicated servers may be still starting: together with the workers, or again after a failure.
    server_deadline_ = Clock::now() + patience_to_link(options_, options_.servers.empty());
    for (std::size_t i = 0; i < endpoints_.servers.size(); ++i) {
      links_.server_is_local[i] = endpoints_.servers[i].local;
      if (endpoints_.servers[i].dedicated)
        ++awaited_lanes_;
      else if (connects_all_servers_)
        dial_server(i, endpoints_.servers[i].addresses);
    }
    for (std::size_t rank = 0; rank < links_.worker_count; ++rank)
      if (is_neighbour(rank)) await_peer(rank);
    lobby_->open(
        [this](std::shared_ptr<Flow> flow) { adopt(std::move(flow), LinkKind::peer, LinkState::kUnknown, 0, false); });
  });
  // The look-up of names happens here, because it must not block the loop.
  for (const auto& [index, server] : dedicated)
    dial(server.transports, server.addresses.front(), LinkKind::server, index, 0);
}

bool Connections::is_neighbour(std::size_t rank) const {
  const auto other = static_cast<std::uint32_t>(rank);
  const bool near = rank != links_.rank && links_.hosts.together() && links_.hosts.share_rack(links_.rank, other);
  return near || are_neighbours(links_.rank, rank, links_.worker_count);
}

void Connections::connect_servers(const Plan& plan) {
  loop_->check_thread();
  server_deadline_ = Clock::now() + patience_to_link(options_, false);  // one that does not answer may be frozen
  for (const Unit& unit : plan.units)
    for (const Chunk& chunk : unit.chunks) {
      const auto index = static_cast<std::size_t>(chunk.server);
      if (links_.servers[index].empty()) dial_server(index, endpoints_.servers[index].addresses);
    }
}

/// Expects the greetings of a peer. Of two ranks the higher one dials.
void Connections::await_peer(std::size_t rank) {
  if (!links_.peers[rank].empty()) return;
  links_.peers[rank].resize(links_.class_count, nullptr);
  awaited_lanes_ += links_.class_count;
  if (rank > links_.rank) return;
  const auto& peer = endpoints_.peers[rank];
  for (std::size_t priority_class = 0; priority_class < links_.class_count; ++priority_class)
    dial(peer.transports, peer.address, LinkKind::peer, rank, priority_class);
}

void Connections::connect_all_peers() {
  loop_->check_thread();
  if (std::exchange(connects_all_peers_, true)) return;
  peer_deadline_ = Clock::now() + patience_to_link(options_, false);  // one that does not answer may be frozen
  for (std::size_t rank = 0; rank < links_.worker_count; ++rank)
    if (rank != links_.rank) await_peer(rank);
}

void Connections::dial(const Endpoints::Transports& transports, const std::string& address, LinkKind kind,
                       std::size_t index, std::size_t lane) {
  const std::size_t network = std::min(lane % links_.class_count, transports.size() - 1);
  auto connected = [this, kind, index, lane](Result<std::shared_ptr<Flow>> flow) {
    if (flow.ok()) return adopt(std::move(flow.value()), kind, index, lane, true);
    LinkState link;
    link.kind = kind;
    link.index = index;
    callbacks_.on_failure(flow.status().with_context(here() + " cannot connect to " + name_of(kind, index) +
                                                     " (check that it runs, interfaces and firewalls)"),
                          FailureCause::of(FailureSource::unreachable, link));
  };
  const auto deadline = kind == LinkKind::server ? server_deadline_ : peer_deadline_;
  transports[network]->connect(*loop_, part_of(address, network), deadline, std::move(connected));
}

/// Connects all lanes to one server, whose cores' addresses are known. Lanes that are connected stay.
void Connections::dial_server(std::size_t index, const std::vector<std::string>& addresses) {
  auto& lanes = links_.servers[index];
  const std::size_t known = lanes.size();
  lanes.resize(addresses.size() * links_.lanes_per_core(), nullptr);
  awaited_lanes_ += lanes.size() - known;
  for (std::size_t lane = known; lane < lanes.size(); ++lane)
    dial(endpoints_.servers[index].transports, addresses[lane / links_.lanes_per_core()], LinkKind::server, index,
         lane);
}

bool Connections::redial(const LinkState& link) {
  loop_->check_thread();
  const auto wait = std::chrono::milliseconds(std::uniform_int_distribution(kLeastRedialMs, kMostRedialMs)(jitter_));
  if (link.kind != LinkKind::server || link.greeted || options_.servers.empty()) return false;
  if (Clock::now() + wait >= server_deadline_) return false;
  const auto& server = endpoints_.servers[link.index];
  // The first core's address may be a name, which the loop must not look up again.
  const std::string address =
      server.dedicated ? link.flow->peer_name() : server.addresses[link.lane / links_.lanes_per_core()];
  loop_->call_at(Clock::now() + wait, [this, address, index = link.index, lane = link.lane] {
    if (!closing_) dial(endpoints_.servers[index].transports, address, LinkKind::server, index, lane);
  });
  return true;
}

void Connections::adopt(std::shared_ptr<Flow> flow, LinkKind kind, std::size_t index, std::size_t lane, bool greet) {
  Flow& adopted = *flow;
  LinkState& link = flows_[&adopted];
  link.flow = std::move(flow);
  link.kind = kind;
  link.index = index;
  link.lane = lane;
  link.last_progress_ns = now_ns();
  adopted.tag = static_cast<int>(index);
  adopted.set_context(&link);
  note(FlightEvent::Kind::connected, link, "");
  adopted.set_receiver(&receiver_);
  if (closing_) return end(link);  // a peer may need this rank for the first time when it has failed
  if (greet) send_hello(adopted, lane);
  if (!link.known()) watch_pending(link.flow);
}

/// Closes a connection whose peer does not identify itself in time, because it holds a descriptor.
void Connections::watch_pending(const std::shared_ptr<Flow>& flow) {
  const auto patience = std::min<std::chrono::milliseconds>(kHelloPatience, options_.timeout);
  loop_->call_at(Clock::now() + patience, [this, pending = std::weak_ptr<Flow>(flow)] {
    const auto kept = pending.lock();
    if (const auto found = flows_.find(kept.get()); found != flows_.end() && !found->second.known())
      kept->close(std::chrono::milliseconds(0));
  });
}

/// Sends the first message of a connection. The lane says which of the connections between the two processes it is.
void Connections::send_hello(Flow& flow, std::size_t lane) {
  const auto index = static_cast<std::uint32_t>(lane % links_.lanes_per_core() / links_.class_count);
  const auto priority_class = static_cast<std::uint32_t>(lane % links_.class_count);
  mark(flow, priority_class);
  const auto hello = wire::Hello{links_.rank,
                                 links_.worker_count,
                                 options_.job,
                                 index,
                                 {},
                                 priority_class,
                                 options_.generation,
                                 wire::pace_of(options_).value(),  // Client::connect has checked them
                                 endpoints_.run,
                                 own_host()}
                         .make();
  flow.send(hello.header, {hello.payload()}, [text = hello.text](const Status&) {});
}

/// This rank's rack (its machine without racks), if its workers add up their gradients among themselves.
std::optional<wire::Hello::Host> Connections::own_host() const {
  if (!links_.hosts.together()) return std::nullopt;
  return wire::Hello::Host{links_.hosts.rack_of(links_.rank), links_.hosts.rack_count()};
}

void Connections::mark(Flow& flow, std::size_t priority_class) {
  const Status status = flow.set_traffic_class(traffic_class_of(options_, priority_class));
  if (status.ok() || std::exchange(told_of_marks_, true)) return;
  callbacks_.on_notice(status.message() + "; the job goes on, and priorities apply on the hosts, not in the network");
}

Status Connections::on_hello(LinkState& link, const wire::Hello& hello) {
  loop_->check_thread();
  const std::string from = link.flow->peer_name();
  if (link.greeted || hello.job != options_.job ||
      (hello.generation == options_.generation && hello.worker_count != links_.worker_count))
    return {ErrorCode::refused, from + " belongs to another job ('" + hello.job +
                                    "'); end what still runs of an earlier job, or give this one another MASTER_PORT"};
  if (hello.generation != options_.generation)
    return {ErrorCode::refused, concat(from, " is in generation ", hello.generation, " of the job, rank ",
                                       options_.rank, " in ", options_.generation)};
  if (link.kind == LinkKind::server) {
    greeted_by_server(link, hello);
  } else if (Status status = greeted_by_peer(link, hello); !status.ok()) {
    return status;
  }
  link.greeted = true;
  --awaited_lanes_;
  link.last_sign_ns = now_ns();
  note(FlightEvent::Kind::greeted, link, "");
  return {};
}

Status Connections::greeted_by_peer(LinkState& link, const wire::Hello& hello) {
  const std::string from = link.flow->peer_name();
  if (hello.run != endpoints_.run) return {ErrorCode::refused, from + " is of another run of the job"};
  if (!link.known()) {
    const bool fits =
        hello.rank < links_.worker_count && hello.rank > links_.rank && hello.priority_class < links_.class_count;
    if (fits) await_peer(hello.rank);  // it may need all peers before this rank
    if (!fits || links_.peers[hello.rank][hello.priority_class] != nullptr)
      return {ErrorCode::refused, concat(from, " claims rank ", hello.rank,
                                         ", which is taken; see whether two processes have the same RANK")};
    link.index = hello.rank;
    link.lane = hello.priority_class;
    link.flow->tag = static_cast<int>(hello.rank);
    send_hello(*link.flow, link.lane);
  } else if (hello.rank != link.index) {
    return {ErrorCode::refused, concat(from, " is rank ", hello.rank, ", not ", link.index,
                                       "; see whether two processes have the same RANK")};
  }
  links_.peers[link.index][link.lane] = link.flow.get();
  ++greeted_peer_lanes_;
  return {};
}

void Connections::greeted_by_server(LinkState& link, const wire::Hello& hello) {
  Flow& flow = *link.flow;
  auto& server = endpoints_.servers[link.index];
  servers_save_ |= hello.saves;
  if (!links_.push_windows.empty()) links_.push_windows[link.index]->set_round_trip(flow.answer().least_round_trip);
  if (std::exchange(server.dedicated, false)) {
    // Only the hello tells the server's cores. A core that listens on all interfaces is reached at the address where
    // the first core was found. That is an address and not a name, so no further look-up is needed.
    std::string& found = server.addresses.front();
    if (flow.peer_name().ends_with(found.substr(found.rfind(':')))) found = flow.peer_name();
    const std::string host = found.substr(0, found.rfind(':'));
    for (const std::string& other : hello.other_cores) {
      const bool anywhere = other.starts_with("0.0.0.0:") || other.starts_with("[::]:");
      server.addresses.push_back(anywhere ? host + other.substr(other.rfind(':')) : other);
    }
    links_.servers[link.index].push_back(&flow);
    dial_server(link.index, std::vector<std::string>(server.addresses));
  }
  links_.servers[link.index][link.lane] = &flow;
}

bool Connections::may_bring(const LinkState& link, const wire::Header& header) const {
  loop_->check_thread();
  if (header.rank == link.index) return true;
  return header.rank < links_.worker_count && links_.hosts.source_of(links_.rank, header.rank) == link.index;
}

std::vector<int> Connections::core_counts() const {
  loop_->check_thread();
  std::vector<int> counts;
  counts.reserve(endpoints_.servers.size());
  for (const auto& server : endpoints_.servers) counts.push_back(static_cast<int>(server.addresses.size()));
  return counts;
}

void Connections::say_goodbye() {
  loop_->check_thread();
  for (const auto& window : links_.push_windows) window->open();  // a goodbye is the last message
  for (auto& [key, link] : flows_) {
    link.leaving = true;
    link.flow->send(wire::Goodbye::make(), {}, [](const Status&) {});
  }
}

void Connections::close(const wire::Header& last_message, const std::shared_ptr<const std::string>& text) {
  loop_->check_thread();
  closing_ = true;
  last_message_ = last_message;
  last_text_ = text;
  for (const auto& window : links_.push_windows) window->drop();
  for (auto& [key, link] : flows_) end(link);
}

void Connections::end(LinkState& link) {
  if (!link.leaving)
    link.flow->send(last_message_, {std::as_bytes(std::span(*last_text_))}, [text = last_text_](const Status&) {});
  link.flow->close(kLinger);
}

InsertionMap<const Flow, LinkState>::Node Connections::remove(Flow& flow) {
  loop_->check_thread();
  auto node = flows_.extract(&flow);
  invariant(!node.empty(), "a connection closes once");
  const LinkState& link = node.mapped();
  note(FlightEvent::Kind::closed, link, link.left ? "goodbye" : "");
  if (link.known()) ended_links_.push_back(report_of(link, false));
  // What comes from others may be for a peer that has left (host_reduction.h).
  if (link.known())
    std::ranges::replace((link.kind == LinkKind::peer ? links_.peers : links_.servers)[link.index], &flow, nullptr);
  closed_traffic_ += flow.traffic();
  return node;
}

template <typename Visit>
void Connections::visit(LinkKind kind, std::size_t index, const Visit& visit_link) const {
  for (const Flow* lane : kind == LinkKind::peer ? links_.peers[index] : links_.servers[index]) {
    const auto found = flows_.find(lane);  // a flow that has closed is not there, or another has its address
    if (found == flows_.end() || found->second.kind != kind || found->second.index != index) continue;
    visit_link(found->second);
  }
}

template <typename Visit>
void Connections::visit(std::size_t rank, const Visit& visit_link) const {
  visit(LinkKind::peer, rank, visit_link);
  if (colocated_) visit(LinkKind::server, rank, visit_link);
}

bool Connections::is_last(const LinkState& link) const {
  loop_->check_thread();
  bool last = true;
  visit(link.kind, link.index, [&last](const LinkState& other) { last = last && other.left; });
  return last;
}

std::vector<std::size_t> Connections::neighbours() const {
  std::vector<std::size_t> ranks;
  for (std::size_t rank = 0; rank < links_.worker_count; ++rank)
    if (is_neighbour(rank)) ranks.push_back(rank);
  return ranks;
}

/// Calls visit_link(link) for the first connection to each neighbour that stays.
template <typename Visit>
void Connections::visit_neighbours(const Visit& visit_link) {
  for (const std::size_t rank : neighbours()) {
    if (links_.peers[rank].empty()) continue;
    const auto found = flows_.find(links_.peers[rank].front());
    if (found == flows_.end()) continue;
    LinkState& link = found->second;
    if (link.kind == LinkKind::peer && !link.left && !link.leaving) visit_link(link);
  }
}

void Connections::beat(std::uint32_t level) {
  loop_->check_thread();
  visit_neighbours([&](LinkState& link) {
    if (!link.beating) send_heartbeat(link, level);
  });
}

void Connections::send_heartbeat(LinkState& link, std::uint32_t level) {
  link.beating = true;
  send_uncounted(link, wire::Heartbeat{level}.make(), nullptr);
}

void Connections::tell_waiting(const std::string& text) {
  loop_->check_thread();
  const wire::TextMessage message = wire::Waiting{text}.make();
  visit_neighbours([&](LinkState& link) { send_uncounted(link, message.header, message.text); });
}

/// Sends a message that is no progress of a step.
void Connections::send_uncounted(LinkState& link, const wire::Header& header, std::shared_ptr<const std::string> text) {
  Pieces payload;
  if (text) payload.push_back(std::as_bytes(std::span(*text)));
  link.flow->send(header, std::move(payload), [this, &link, header, text](const Status& status) {
    if (!text) link.beating = false;
    const bool counts_bytes = link.flow->traffic().bytes_sent > 0;  // not within a host; a hello has been sent before
    if (status.ok() && counts_bytes) heartbeat_bytes_sent_ += wire::kHeaderBytes + header.payload_bytes;
  });
}

bool Connections::is_idle(bool ask) {
  loop_->check_thread();
  bool idle = ask && all_greeted();
  for (auto& [flow, link] : flows_) {
    idle = idle && !link.limited && flow->bytes_delivered() == flow->traffic().bytes_sent;
    if (link.kind != LinkKind::server || !link.greeted || link.left || link.lane % links_.lanes_per_core() != 0)
      continue;
    idle = std::exchange(link.idle, false) && idle;
    if (!ask || link.asked_ns != 0) continue;
    link.asked_ns = now_ns();
    send_heartbeat(link, 0);
  }
  return idle;
}

std::int64_t Connections::longest_silence_ns(std::span<const std::int64_t> signs_ns) const {
  loop_->check_thread();
  std::int64_t oldest_ns = now_ns();
  for (const std::int64_t sign_ns : signs_ns)
    if (sign_ns != 0) oldest_ns = std::min(oldest_ns, sign_ns);
  for (const auto& [flow, link] : flows_)
    if (link.kind == LinkKind::server && !colocated_ && link.asked_ns != 0)
      oldest_ns = std::min(oldest_ns, link.asked_ns);
  return oldest_ns;
}

std::vector<std::int64_t> Connections::signs_of_life() const {
  loop_->check_thread();
  std::vector<std::int64_t> signs_ns(links_.worker_count, 0);
  for (std::size_t rank = 0; rank < links_.worker_count; ++rank) {
    if (!is_neighbour(rank)) continue;
    bool stays = false;
    std::int64_t latest_ns = 0;
    visit(rank, [&](const LinkState& link) {
      stays = stays || (link.kind == LinkKind::peer && !link.left);
      latest_ns = std::max(latest_ns, link.last_sign_ns);
    });
    if (stays) signs_ns[rank] = latest_ns;
  }
  return signs_ns;
}

void Connections::tell_servers(const wire::Header& message) {
  loop_->check_thread();
  for (std::size_t server = 0; server < links_.servers.size(); ++server) {
    if (links_.server_is_local[server]) continue;
    visit(LinkKind::server, server, [&](const LinkState& link) {
      if (link.greeted && !link.left && link.lane % links_.lanes_per_core() == 0)
        link.flow->send(message, {}, [](const Status&) {});
    });
  }
}

Flow::Answer Connections::answer_of(std::size_t rank) const {
  loop_->check_thread();
  std::optional<Flow::Answer> least;
  visit(rank, [&least](const LinkState& link) {
    const Flow::Answer answer = link.flow->answer();
    if (answer.missing.count() > 0 && (!least || answer.missing < least->missing)) least = answer;
  });
  return least.value_or(Flow::Answer{});
}

}  // namespace poseidon
