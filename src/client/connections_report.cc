// What a client says about its connections: events of the flight recorder, names in messages, reports for records, and
// what they have carried.
#include <algorithm>
#include <cerrno>
#include <initializer_list>
#include <map>
#include <string>
#include <utility>

#include "base/file_descriptor.h"
#include "client/connections.h"
#include "client/duration_text.h"

namespace poseidon {

namespace {
constexpr std::size_t kMostHeard = 8;  // in a message
}  // namespace

void Connections::note(FlightEvent::Kind kind, const LinkState& link, const char* what, const wire::Header* about) {
  loop_->check_thread();
  FlightEvent event;
  event.kind = kind;
  event.what = what;
  event.party = link.party();
  event.index = static_cast<std::uint32_t>(link.index);
  event.lane = static_cast<std::uint16_t>(link.lane);
  if (about != nullptr) {
    event.time_ns = link.last_progress_ns;
    event.unit = about->unit;
    event.chunk = about->chunk;
    event.step = about->step;
    event.bytes = about->payload_bytes;
  }
  recorder_.note(event);
}

std::string Connections::here() const { return concat("rank ", options_.rank, " on ", host_); }

std::string Connections::host_of(LinkKind kind, std::size_t index) const {
  if (kind == LinkKind::peer) return index < endpoints_.peers.size() ? endpoints_.peers[index].host : "";
  return index < endpoints_.servers.size() ? endpoints_.servers[index].host : "";
}

std::string Connections::name_of(LinkKind kind, std::size_t index) const {
  if (index == LinkState::kUnknown) return "an unknown process";
  const std::string host = host_of(kind, index);
  const std::string what = kind == LinkKind::peer ? "rank " : colocated_ ? "the shard of rank " : "server ";
  return concat(what, index, host.empty() ? "" : " on " + host);
}

std::string Connections::describe(const LinkState& link) const {
  loop_->check_thread();
  return name_of(link.kind, link.index) + " (" + link.flow->peer_name() + ")";
}

std::string Connections::not_linked() const {
  loop_->check_thread();
  std::string names;
  const auto add = [&names](const std::string& name) { names += (names.empty() ? "" : ", ") + name; };
  for (std::size_t i = 0; i < links_.servers.size(); ++i) {
    const auto& lanes = links_.servers[i];
    if (endpoints_.servers[i].dedicated || std::count(lanes.begin(), lanes.end(), nullptr) > 0)
      add(concat("server ", i));
  }
  for (std::size_t rank = 0; rank < links_.peers.size(); ++rank)
    if (std::count(links_.peers[rank].begin(), links_.peers[rank].end(), nullptr) > 0) add(concat("rank ", rank));
  return names;
}

std::string Connections::what_to_check(const std::string& reason) const {
  loop_->check_thread();
  const auto is = [&reason](std::initializer_list<int> errors) {
    return std::ranges::any_of(errors, [&](int error) { return reason.find(errno_text(error)) != std::string::npos; });
  };
  // A process that dies before it has read everything resets its connections, too.
  if (is({ECONNRESET, EPIPE}))
    return "; its process has ended, or its machine or a firewall between has reset the connection; see its output";
  if (is({ETIMEDOUT, EHOSTUNREACH, EHOSTDOWN, ENETUNREACH, ENETDOWN})) return where_it_is_cut();
  return "; its process or host has died, see its output";
}

std::string Connections::where_it_is_cut() const {
  loop_->check_thread();
  constexpr std::chrono::seconds kQuiet{2};
  std::map<std::string, std::int64_t> heard_ns;  // by machine
  for (const auto& [flow, link] : flows_) {
    if (link.kind != LinkKind::peer || !link.known() || link.index >= endpoints_.peers.size()) continue;
    const std::string& host = endpoints_.peers[link.index].host;
    if (host != host_) heard_ns[host] = std::max(heard_ns[host], link.last_sign_ns);
  }
  const std::int64_t since_ns = ran_since_ns(kQuiet);
  const bool alone =
      heard_ns.size() > 1 && std::ranges::all_of(heard_ns, [&](const auto& one) { return one.second < since_ns; });
  if (alone) return "; this machine hears no other one: look at its own cable, port and network first";
  return "; its machine is down, or the network is cut there, at this machine, or between";
}

std::string Connections::last_heard() const {
  loop_->check_thread();
  std::map<std::string, std::int64_t> heard_ns;
  const auto add = [&](bool peer, std::size_t index, std::int64_t time_ns) {
    if (index == LinkState::kUnknown || (index == links_.rank && (peer || colocated_))) return;
    auto& latest_ns = heard_ns[(peer || colocated_ ? "rank " : "server ") + std::to_string(index)];
    latest_ns = std::max(latest_ns, time_ns);
  };
  for (const auto& [flow, link] : flows_) add(link.kind == LinkKind::peer, link.index, link.last_progress_ns);
  for (const LinkReport& link : ended_links_)
    add(link.party == FlightEvent::Party::peer, link.index, link.last_progress_ns);
  std::vector<std::pair<std::int64_t, std::string>> silent;
  silent.reserve(heard_ns.size());
  const std::int64_t time_ns = now_ns();
  for (const auto& [name, latest_ns] : heard_ns) silent.emplace_back(time_ns - latest_ns, name);
  std::sort(silent.rbegin(), silent.rend());
  std::string text;
  for (std::size_t i = 0; i < std::min(silent.size(), kMostHeard); ++i)
    text += (i == 0 ? "; last heard of " : ", ") + silent[i].second + " " + duration_text(silent[i].first) + " ago";
  if (silent.size() > kMostHeard) text += concat(", and of ", silent.size() - kMostHeard, " more since");
  return text;
}

LinkReport Connections::report_of(const LinkState& link, bool connected) const {
  LinkReport report;
  report.party = link.party();
  report.index = static_cast<std::uint32_t>(link.index);
  report.lane = link.lane;
  report.host = host_of(link.kind, link.index);
  report.address = link.flow->peer_name();
  report.connected = connected;
  report.greeted = link.greeted;
  report.left = link.left;
  report.last_progress_ns = link.last_progress_ns;
  report.traffic = link.flow->traffic();
  if (link.in_payload) report.receiving = link.receiving;
  report.received_bytes = link.received_bytes;
  return report;
}

std::vector<LinkReport> Connections::reports() const {
  loop_->check_thread();
  auto reports = ended_links_;
  for (const auto& [flow, link] : flows_)
    if (link.known()) reports.push_back(report_of(link, true));
  return reports;
}

TrafficStats Connections::traffic() const {
  loop_->check_thread();
  TrafficStats stats = closed_traffic_;
  for (const auto& [key, link] : flows_) stats += link.flow->traffic();
  return stats;
}

/// Sent bytes count as progress, because a large push over a slow network takes long.
void Connections::note_traffic() {
  loop_->check_thread();
  const std::uint64_t bytes_sent = traffic().bytes_sent - heartbeat_bytes_sent_;
  if (std::exchange(known_bytes_sent_, bytes_sent) != bytes_sent)
    last_progress_ns_.store(now_ns(), std::memory_order_relaxed);
}

}  // namespace poseidon
