// What ClientImpl tells people: who is who and what is waited for, and the flight record of a failure.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <iterator>
#include <utility>

#include "base/host.h"
#include "client/client_impl.h"

namespace poseidon {

namespace {

constexpr std::size_t kMostWaiting = 64;  // in a record
constexpr std::size_t kMostHeard = 8;     // in a message

std::string duration_text(std::int64_t duration_ns) {
  std::array<char, 32> text{};
  if (duration_ns < 1'000'000'000)
    std::snprintf(text.data(), text.size(), "%lld ms", static_cast<long long>(duration_ns / 1'000'000));
  else
    std::snprintf(text.data(), text.size(), "%.1f s", static_cast<double>(duration_ns) / 1e9);
  return text.data();
}

}  // namespace

std::string ClientImpl::here() const { return "rank " + std::to_string(options_.rank) + " on " + host_; }

std::string ClientImpl::host_of(LinkKind kind, std::size_t index) const {
  if (kind == LinkKind::peer) return index < endpoints_.peers.size() ? endpoints_.peers[index].host : "";
  return index < endpoints_.servers.size() ? endpoints_.servers[index].host : "";
}

std::string ClientImpl::name_of(LinkKind kind, std::size_t index) const {
  if (index == kUnknown) return "a stranger";
  const std::string host = host_of(kind, index);
  const std::string what = kind == LinkKind::peer                       ? "rank "
                           : cluster_.placement == Placement::colocated ? "the shard of rank "
                                                                        : "server ";
  return what + std::to_string(index) + (host.empty() ? "" : " on " + host);
}

std::string ClientImpl::describe(const LinkState& link) const {
  return name_of(link.kind, link.index) + " (" + link.flow->peer_name() + ")";
}

std::string ClientImpl::not_linked() const {
  std::string names;
  const auto add = [&names](const std::string& name) { names += (names.empty() ? "" : ", ") + name; };
  for (std::size_t i = 0; i < links_.servers.size(); ++i) {
    const auto& lanes = links_.servers[i];
    if (lanes.empty() || std::count(lanes.begin(), lanes.end(), nullptr) > 0) add("server " + std::to_string(i));
  }
  for (std::size_t rank = 0; rank < links_.peers.size(); ++rank)
    if (std::count(links_.peers[rank].begin(), links_.peers[rank].end(), nullptr) > 0)
      add("rank " + std::to_string(rank));
  return names;
}

bool ClientImpl::linked() const {
  const std::lock_guard lock(mutex_);
  return linked_;
}

std::string ClientImpl::describe_waiting() const {
  const UnitState* first = nullptr;
  std::size_t count = 0;
  for (const auto& [id, unit] : units_by_id_) {
    if (!unit->syncer.exchange().progress.running) continue;
    if (first == nullptr) first = unit;
    ++count;
  }
  if (first == nullptr) return linked() ? "nothing was in flight" : "waiting for a greeting from " + not_linked();
  const Exchange& exchange = first->syncer.exchange();
  return "in step " + std::to_string(exchange.step) + " layer '" + exchange.unit().name + "' (" +
         std::string(scheme_name(exchange.outcome.scheme)) + ") was " + first->syncer.waiting_for() +
         (count > 1 ? ", and " + std::to_string(count - 1) + " more layers in flight" : "");
}

/// "; last heard of rank 2 31.2 s ago, rank 1 12 ms ago": each process once, those silent for longest first.
std::string ClientImpl::last_heard() const {
  std::map<std::string, std::int64_t> heard_ns;
  const bool colocated = cluster_.placement == Placement::colocated;
  const auto add = [&](bool peer, std::size_t index, std::int64_t time_ns) {
    if (index == kUnknown || (index == links_.rank && (peer || colocated))) return;
    auto& latest_ns = heard_ns[(peer || colocated ? "rank " : "server ") + std::to_string(index)];
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
  if (silent.size() > kMostHeard) text += ", and of " + std::to_string(silent.size() - kMostHeard) + " more since";
  return text;
}

FlightEvent::Party ClientImpl::party_of(LinkKind kind) {
  return kind == LinkKind::peer ? FlightEvent::Party::peer : FlightEvent::Party::server;
}

void ClientImpl::note(FlightEvent::Kind kind, const LinkState& link, const char* what, const wire::Header* about) {
  FlightEvent event;
  event.kind = kind;
  event.what = what;
  event.party = party_of(link.kind);
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

void ClientImpl::heard(LinkState& link) {
  link.last_progress_ns = now_ns();
  last_progress_ns_.store(link.last_progress_ns, std::memory_order_relaxed);
}

/// What leaves counts as progress, too: a large push over a slow network takes its time.
void ClientImpl::note_traffic() {
  std::uint64_t bytes_sent = closed_bytes_sent_;
  for (const auto& [key, link] : flows_) bytes_sent += link.flow->bytes_sent();
  if (std::exchange(known_bytes_sent_, bytes_sent) != bytes_sent)
    last_progress_ns_.store(now_ns(), std::memory_order_relaxed);
}

LinkReport ClientImpl::report_of_link(const LinkState& link, bool connected) const {
  LinkReport report;
  report.party = party_of(link.kind);
  report.index = static_cast<std::uint32_t>(link.index);
  report.lane = link.lane;
  report.host = host_of(link.kind, link.index);
  report.address = link.flow->peer_name();
  report.connected = connected;
  report.greeted = link.greeted;
  report.left = link.left;
  report.last_progress_ns = link.last_progress_ns;
  report.bytes_sent = link.flow->bytes_sent();
  report.bytes_received = link.flow->bytes_received();
  if (link.in_payload) report.receiving = link.receiving;
  report.received_bytes = link.received_bytes;
  return report;
}

FlightReport ClientImpl::make_report(const Status& status, const Cause& cause, std::int64_t time_of_day_ns) const {
  FlightReport report;
  FlightRecordHead& head = report.head;
  head.process = "worker";
  head.job = options_.job;
  head.run = endpoints_.run;
  head.generation = options_.generation;
  head.rank = options_.rank;
  head.slot = seat_.slot;
  head.world_size = options_.world_size;
  head.phase = endpoints_.peers.empty() ? "meeting" : linked() ? "running" : "linking";
  head.timeout_s = std::chrono::duration<double>(options_.timeout).count();
  head.error = status;
  head.source = cause.source;
  head.party = cause.party;
  head.index = cause.index;
  head.time_ns = now_ns();
  head.wall_ns = time_of_day_ns;
  if (!linked()) report.not_linked = not_linked();
  report.links = ended_links_;
  for (const auto& [flow, link] : flows_)
    if (link.index != kUnknown) report.links.push_back(report_of_link(link, true));
  for (const auto& [id, unit] : units_by_id_) {
    if (!unit->syncer.exchange().progress.running || ++report.waiting_count > kMostWaiting) continue;
    report.waiting.push_back(report_of(unit->syncer.exchange(), unit->syncer.waiting_for()));
  }
  report.events = recorder_.events();
  for (const FlightEvent& event : report.events.events)
    if (const auto unit = units_by_id_.find(event.unit); unit != units_by_id_.end())
      report.units.try_emplace(event.unit, unit->second->syncer.unit().name);
  return report;
}

void ClientImpl::fail(const Status& status, const Cause& cause) {
  if (closing_) return;
  FlightEvent event;
  event.kind = FlightEvent::Kind::failed;
  event.what = error_code_name(status.code()).data();  // names are literals
  event.party = cause.party;
  event.index = cause.index;
  recorder_.note(event);
  // One that is told keeps the first teller's words and code, so that all ranks name one cause.
  const wire::TextMessage message = wire::Abort{status, cause.planned}.make();
  if (record_directory_.empty() || cause.planned) return stop(status, message.header, message.text, {});
  const std::int64_t time_ns = wall_ns();
  const std::string path =
      flight_record_path(record_directory_, options_.job, "rank" + std::to_string(seat_.slot), time_ns);
  const Status own(status.code(), status.message() + "; flight record: " + path);
  stop(own, message.header, message.text, [this, status, cause, time_ns, path] {
    record_writer_.start(path, [report = make_report(status, cause, time_ns), server = server_report_] {
      return to_json(report, server);
    });
  });
}

Status ClientImpl::fail_to_join(const Status& status) {
  const FailureSource source = status.code() == ErrorCode::timeout   ? FailureSource::silent
                               : status.code() == ErrorCode::aborted ? FailureSource::told
                                                                     : FailureSource::found;
  loop_->call([this, &status, source] { fail(status, {source}); });
  return this->status();
}

Status ClientImpl::status() const {
  const std::lock_guard lock(mutex_);
  return status_;
}

std::vector<LateRank> ClientImpl::straggler_report() const {
  auto report = parts_->late_ranks();
  LateRank own{static_cast<std::uint32_t>(options_.rank)};
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [plan, one] : lateness_) one.add_to(own);
  }
  if (own.late_chunks == 0) return report;
  // A rank knows about itself from all servers, the embedded server only what it has seen.
  std::erase_if(report, [&own](const LateRank& one) { return one.rank == own.rank; });
  report.insert(std::ranges::upper_bound(report, own.rank, {}, &LateRank::rank), own);
  return report;
}

std::uint64_t ClientImpl::behind() const {
  const std::lock_guard lock(mutex_);
  std::uint64_t most = 0;
  for (const auto& [plan, one] : lateness_) most = std::max<std::uint64_t>(most, one.behind());
  return most;
}

std::vector<std::string> ClientImpl::notices() const {
  auto of_parts = parts_->notices();
  const std::lock_guard lock(mutex_);
  auto all = notices_;
  std::ranges::move(of_parts, std::back_inserter(all));
  return all;
}

}  // namespace poseidon
