// How ClientImpl is connected to servers and peers, on its loop: dialling, greeting, and who is let in.
#include <algorithm>
#include <sstream>
#include <utility>

#include "client/client_impl.h"
#include "transport/traffic_class.h"
#include "wire/messages.h"

namespace poseidon {

namespace {
constexpr auto kShortestPatience = std::chrono::milliseconds(1000);
constexpr auto kHelloPatience = std::chrono::seconds(5);

/// For how long to try to connect: it gives up shortly before the wait for it does, since it can say why.
std::chrono::milliseconds patience_to_link(const Options& options, bool is_listening) {
  const auto most = options.timeout * 9 / 10;
  if (options.on_failure == OnFailure::abort || !is_listening) return most;
  // Whoever listened before it said where and refuses now has died since, and the job forms anew without it.
  return std::min(most, std::max(options.timeout / 20, kShortestPatience));
}

/// The part of an address that is for one of several transports.
std::string part_of(const std::string& address, std::size_t index) {
  std::istringstream parts(address);
  std::string part;
  for (std::size_t i = 0; i <= index; ++i) std::getline(parts, part, '|');
  return part;
}
}  // namespace

Status ClientImpl::link(const Endpoints& endpoints, const std::function<bool()>& keep_waiting) {
  loop_->call([this, &endpoints] {
    endpoints_ = endpoints;
    peer_deadline_ = Clock::now() + patience_to_link(options_, true);
    // Dedicated servers may still be on their way: with the first workers, or started again.
    server_deadline_ = Clock::now() + patience_to_link(options_, options_.servers.empty());
    for (std::size_t i = 0; i < endpoints_.servers.size(); ++i) {
      const auto& server = endpoints_.servers[i];
      links_.server_is_local[i] = server.local;
      if (!server.dedicated) dial_server(i, server.addresses);
    }
    for (std::size_t rank = 0; rank < links_.rank; ++rank) {
      const auto& peer = endpoints_.peers[rank];
      for (std::size_t priority_class = 0; priority_class < links_.class_count; ++priority_class)
        dial(peer.transports, peer.address, LinkKind::peer, rank, priority_class);
    }
    lobby_->open([this](std::shared_ptr<Flow> flow) { adopt(std::move(flow), LinkKind::peer, kUnknown, 0, false); });
  });
  // Here, since these may be names that have to be looked up: that must not hold up the loop.
  for (std::size_t i = 0; i < endpoints.servers.size(); ++i)
    if (const auto& server = endpoints.servers[i]; server.dedicated)
      dial(server.transports, server.addresses.front(), LinkKind::server, i, 0);
  if (Status status = wait_until([this] { return linked_ || !status_.ok(); }, keep_waiting); !status.ok())
    return status;
  Layer check;
  check.name = "plan check";
  check.dtype = DType::int64;
  check.element_count = static_cast<std::size_t>(options_.world_size);
  check.scheme = Scheme::ps;
  auto added = add_layers({check}, false, keep_waiting);
  return added.ok() ? Status() : added.status();
}

void ClientImpl::dial(const Endpoints::Transports& transports, const std::string& address, LinkKind kind,
                      std::size_t index, std::size_t lane) {
  const std::size_t network = std::min(lane % links_.class_count, transports.size() - 1);
  auto connected = [this, kind, index, lane](Result<std::shared_ptr<Flow>> flow) {
    if (flow.ok()) return adopt(std::move(flow.value()), kind, index, lane, true);
    fail(flow.status().with_context(here() + " cannot connect to " + name_of(kind, index) +
                                    " (check that it runs, interfaces and firewalls)"),
         {FailureSource::unreachable, party_of(kind), static_cast<std::uint32_t>(index)});
  };
  const auto deadline = kind == LinkKind::server ? server_deadline_ : peer_deadline_;
  transports[network]->connect(*loop_, part_of(address, network), deadline, std::move(connected));
}

/// All connections to one server, whose cores' addresses are known; those that are there stay.
void ClientImpl::dial_server(std::size_t index, const std::vector<std::string>& addresses) {
  auto& lanes = links_.servers[index];
  const std::size_t known = lanes.size();
  lanes.resize(addresses.size() * links_.lanes_per_core(), nullptr);
  for (std::size_t lane = known; lane < lanes.size(); ++lane)
    dial(endpoints_.servers[index].transports, addresses[lane / links_.lanes_per_core()], LinkKind::server, index,
         lane);
}

void ClientImpl::adopt(std::shared_ptr<Flow> flow, LinkKind kind, std::size_t index, std::size_t lane, bool greet) {
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
  adopted.set_receiver(this);
  if (closing_) return adopted.close(kLinger);
  if (greet) send_hello(adopted, lane);
  if (index == kUnknown) watch_stranger(link.flow);
}

/// Who has come and does not say who it is holds a descriptor.
void ClientImpl::watch_stranger(const std::shared_ptr<Flow>& flow) {
  const auto patience = std::min<std::chrono::milliseconds>(kHelloPatience, options_.timeout);
  loop_->call_at(Clock::now() + patience, [this, stranger = std::weak_ptr<Flow>(flow)] {
    const auto kept = stranger.lock();
    if (const auto found = flows_.find(kept.get()); found != flows_.end() && found->second.index == kUnknown)
      kept->close(std::chrono::milliseconds(0));
  });
}

/// The first message of a connection, whose lane says which of those between the two it is.
void ClientImpl::send_hello(Flow& flow, std::size_t lane) {
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
                                 endpoints_.run}
                         .make();
  flow.send(hello.header, {hello.payload()}, [text = hello.text](const Status&) {});
}

void ClientImpl::mark(Flow& flow, std::size_t priority_class) {
  const Status status = flow.set_traffic_class(traffic_class_of(options_, priority_class));
  if (status.ok() || std::exchange(told_of_marks_, true)) return;
  const std::lock_guard lock(mutex_);
  notices_.push_back(status.message() + "; the job goes on, priorities hold on the hosts alone");
}

Status ClientImpl::on_hello(Flow& flow, LinkState& link, const wire::Header& header,
                            std::span<const std::byte> payload) {
  const wire::Hello hello = wire::Hello::read(header, payload);
  if (link.greeted || hello.job != options_.job ||
      (hello.generation == options_.generation && hello.worker_count != links_.worker_count))
    return {ErrorCode::refused, flow.peer_name() + " belongs to another job ('" + hello.job + "')"};
  if (hello.generation != options_.generation)
    return {ErrorCode::refused, flow.peer_name() + " is in generation " + std::to_string(hello.generation) +
                                    " of the job, rank " + std::to_string(options_.rank) + " in " +
                                    std::to_string(options_.generation)};
  if (link.kind == LinkKind::peer) {
    if (hello.run != endpoints_.run) return {ErrorCode::refused, flow.peer_name() + " is of another run of the job"};
    if (link.index == kUnknown) {
      if (hello.rank >= links_.worker_count || hello.rank == links_.rank ||
          hello.priority_class >= links_.class_count || links_.peers[hello.rank][hello.priority_class] != nullptr)
        return {ErrorCode::refused,
                flow.peer_name() + " claims rank " + std::to_string(hello.rank) + ", which is taken"};
      link.index = hello.rank;
      link.lane = hello.priority_class;
      flow.tag = static_cast<int>(hello.rank);
      send_hello(flow, link.lane);
    } else if (hello.rank != link.index) {
      return {ErrorCode::refused,
              flow.peer_name() + " is rank " + std::to_string(hello.rank) + ", not " + std::to_string(link.index)};
    }
    links_.peers[link.index][link.lane] = &flow;
  } else {
    greeted_by_server(flow, link, hello);
  }
  link.greeted = true;
  note(FlightEvent::Kind::greeted, link, "");
  if (!all_greeted()) return {};
  const std::lock_guard lock(mutex_);
  cluster_.core_counts.clear();
  for (const auto& lanes : links_.servers)
    cluster_.core_counts.push_back(static_cast<int>(lanes.size() / links_.lanes_per_core()));
  linked_ = true;
  changed_.notify_all();
  return {};
}

void ClientImpl::greeted_by_server(Flow& flow, LinkState& link, const wire::Hello& hello) {
  auto& server = endpoints_.servers[link.index];
  if (std::exchange(server.dedicated, false)) {
    // Only now its cores are known. One that listens on all interfaces is where it was found: at an address by now, not
    // under a name that would have to be looked up again.
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

bool ClientImpl::all_greeted() const {
  const auto greeted = [](const Flow* flow) { return flow != nullptr; };
  for (const auto& lanes : links_.servers)
    if (lanes.empty() || !std::all_of(lanes.begin(), lanes.end(), greeted)) return false;
  return std::all_of(links_.peers.begin(), links_.peers.end(),
                     [&](const auto& flows) { return std::all_of(flows.begin(), flows.end(), greeted); });
}

}  // namespace poseidon
