// What ClientImpl tells people: what is waited for, and the flight record of a failure.
#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include "client/client_impl.h"

namespace poseidon {

namespace {

constexpr std::size_t kMostWaiting = 64;  // in a record
}  // namespace

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
  if (first == nullptr)
    return linked() ? "nothing was in flight" : "waiting for a greeting from " + connections_.not_linked();
  const Exchange& exchange = first->syncer.exchange();
  return "in step " + std::to_string(exchange.step) + " layer '" + exchange.unit().name + "' (" +
         std::string(scheme_name(exchange.outcome.scheme)) + ") was " + first->syncer.waiting_for() +
         (count > 1 ? ", and " + std::to_string(count - 1) + " more layers in flight" : "");
}

FlightReport ClientImpl::make_report(const Status& status, const FailureCause& cause,
                                     std::int64_t time_of_day_ns) const {
  FlightReport report;
  FlightRecordHead& head = report.head;
  head.process = "worker";
  head.job = options_.job;
  head.run = connections_.run();
  head.generation = options_.generation;
  head.rank = options_.rank;
  head.slot = seat_.slot;
  head.world_size = options_.world_size;
  head.phase = !connections_.has_endpoints() ? "meeting" : linked() ? "running" : "linking";
  head.timeout_s = std::chrono::duration<double>(options_.timeout).count();
  head.error = status;
  head.source = cause.source;
  head.party = cause.party;
  head.index = cause.index;
  head.time_ns = now_ns();
  head.wall_ns = time_of_day_ns;
  if (!linked()) report.not_linked = connections_.not_linked();
  report.links = connections_.reports();
  for (const auto& [id, unit] : units_by_id_) {
    if (!unit->syncer.exchange().progress.running || ++report.waiting_count > kMostWaiting) continue;
    report.waiting.push_back(report_of(unit->syncer.exchange(), unit->syncer.waiting_for()));
  }
  report.events = connections_.recorder().events();
  for (const FlightEvent& event : report.events.events)
    if (const auto unit = units_by_id_.find(event.unit); unit != units_by_id_.end())
      report.units.try_emplace(event.unit, unit->second->syncer.unit().name);
  return report;
}

void ClientImpl::fail(const Status& status, const FailureCause& cause) {
  if (closing_) return;
  FlightEvent event;
  event.kind = FlightEvent::Kind::failed;
  event.what = error_code_name(status.code()).data();  // names are literals
  event.party = cause.party;
  event.index = cause.index;
  connections_.recorder().note(event);
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

void ClientImpl::add_notice(const std::string& notice) {
  const std::lock_guard lock(mutex_);
  notices_.push_back(notice);
}

std::vector<std::string> ClientImpl::notices() const {
  auto of_parts = parts_->notices();
  const std::lock_guard lock(mutex_);
  auto all = notices_;
  std::ranges::move(of_parts, std::back_inserter(all));
  return all;
}

}  // namespace poseidon
