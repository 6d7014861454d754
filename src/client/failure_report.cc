#include "client/failure_report.h"

#include <chrono>

namespace poseidon {

namespace {
constexpr std::size_t kMostInARecord = 64;
}  // namespace

FailureReport::FailureReport(const Options& options, const Seat& seat, const Connections& connections,
                             const Steps& steps, const std::map<std::uint32_t, UnitState*>& units,
                             const Collectives& collectives)
    : options_(options),
      seat_(seat),
      connections_(connections),
      steps_(steps),
      units_(units),
      collectives_(collectives) {}

Status FailureReport::open_directory() {
  if (options_.flight_record.empty()) return {};
  Status usable = open_record_directory(options_.flight_record);
  if (usable.ok()) directory_ = options_.flight_record;
  return usable;
}

std::string FailureReport::describe_waiting() const {
  one_thread_.check();
  const UnitState* first = nullptr;
  std::size_t count = 0;
  for (const auto& [id, unit] : units_) {
    if (!unit->syncer.exchange().progress.running) continue;
    if (first == nullptr) first = unit;
    ++count;
  }
  if (first == nullptr) {
    if (std::string waits = collectives_.waiting_for(); !waits.empty()) return waits;
    if (const std::string lacks = steps_.lacks_of_group(); !lacks.empty()) return lacks;
    return connections_.all_greeted() ? "nothing was in flight"
                                      : "waiting for a greeting from " + connections_.not_linked();
  }
  const Exchange& exchange = first->syncer.exchange();
  return concat("in step ", exchange.step, " layer '", exchange.unit().name, "' (",
                scheme_name(exchange.outcome.scheme), ") was ", first->syncer.waiting_for(),
                count > 1 ? concat(", and ", count - 1, " more layers in flight") : "");
}

std::optional<FailureReport::Record> FailureReport::new_record(const FailureCause& cause) const {
  one_thread_.check();
  if (directory_.empty() || cause.planned) return std::nullopt;
  const std::int64_t time_ns = wall_ns();
  return Record{flight_record_path(directory_, options_.job, concat("rank", seat_.slot), time_ns), time_ns};
}

void FailureReport::write(const Record& record, const Status& status, const FailureCause& cause) {
  one_thread_.check();
  writer_.start(record.path, [report = make_report(status, cause, record.time_of_day_ns), server = write_server_] {
    return to_json(report, server);
  });
}

FlightReport FailureReport::make_report(const Status& status, const FailureCause& cause,
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
  head.phase = !connections_.has_endpoints() ? "meeting" : steps_.linked() ? "running" : "linking";
  head.timeout_s = std::chrono::duration<double>(options_.timeout).count();
  head.error = status;
  head.source = cause.source;
  head.party = cause.party;
  head.index = cause.index;
  head.time_ns = now_ns();
  head.wall_ns = time_of_day_ns;
  if (!connections_.all_greeted()) report.not_linked = connections_.not_linked();
  report.links = connections_.reports();
  for (const auto& [id, unit] : units_) {
    if (!unit->syncer.exchange().progress.running || ++report.waiting_count > kMostInARecord) continue;
    report.waiting.push_back(report_of(unit->syncer.exchange(), unit->syncer.waiting_for()));
  }
  report.events = connections_.recorder().events();
  for (const FlightEvent& event : report.events.events)
    if (const auto unit = units_.find(event.unit); unit != units_.end())
      report.units.try_emplace(event.unit, unit->second->syncer.unit().name);
  return report;
}

}  // namespace poseidon
