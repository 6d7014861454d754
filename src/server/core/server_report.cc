// What a ServerCore reports to people: overdue chunks, and its part of a flight record.
#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "server/core/connection.h"
#include "server/core/server_core.h"

namespace poseidon {

namespace {

constexpr std::size_t kMostChunks = 64;  // in a flight record
constexpr std::size_t kMostRanks = 8;    // in a sentence

/// A connection's report, for another thread.
struct ConnectionReport {
  std::string job;
  std::uint32_t rank = kNoFlightId;
  std::uint32_t flow_index = 0;
  std::uint32_t priority_class = 0;
  std::string address;
  std::int64_t last_progress_ns = 0;
  TrafficStats traffic;
};

void write_connection(JsonWriter& json, const ConnectionReport& connection, std::int64_t time_ns) {
  json.begin_object().field("job", connection.job).key("rank");
  if (connection.rank == kNoFlightId)
    json.null();
  else
    json.value(connection.rank);
  json.field("flow", connection.flow_index).field("priority_class", connection.priority_class);
  json.field("address", connection.address);
  json.field("last_progress_ms", static_cast<double>(time_ns - connection.last_progress_ns) / 1e6);
  json.field("bytes_sent", connection.traffic.bytes_sent)
      .field("bytes_received", connection.traffic.bytes_received)
      .end_object();
}

Status departed_status(std::uint32_t rank) {
  return {ErrorCode::peer_lost,
          concat("rank ", rank,
                 " has shut down and will not push this; give every rank the same number of steps, "
                 "or use join()")};
}

/// Such as "1, 2, 3" or, of many, "1, 2, 3, 4, 5, 6, 7, 8 and 400 more".
std::string text_of(const std::vector<std::uint32_t>& ranks) {
  std::string text;
  for (std::size_t i = 0; i < std::min(ranks.size(), kMostRanks); ++i)
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  if (ranks.size() > kMostRanks) text += concat(" and ", ranks.size() - kMostRanks, " more");
  return text;
}

void write_chunk(JsonWriter& json, const OpenChunk& chunk, std::int64_t time_ns) {
  json.begin_object().field("unit", chunk.about.unit).field("chunk", chunk.about.chunk).field("step", chunk.about.step);
  json.field("since_ms", static_cast<double>(time_ns - chunk.started_ns) / 1e6).key("missing_ranks").begin_array();
  for (const auto rank : chunk.missing_ranks) json.value(rank);
  json.end_array().end_object();
}

}  // namespace

/// A heartbeat is no progress: a rank that waits for others sends it.
void ServerCore::heard(Connection& connection, const wire::Header& header) {
  if (header.kind != wire::Kind::heartbeat) connection.last_progress_ns = now_ns();
}

void ServerCore::note(FlightEvent::Kind kind, const Connection& connection, const char* what,
                      const wire::Envelope* about) {
  FlightEvent event;
  event.kind = kind;
  event.what = what;
  event.party = FlightEvent::Party::worker;
  event.index = connection.job == nullptr ? kNoFlightId : connection.rank;
  event.lane = static_cast<std::uint16_t>(connection.flow_index);
  event.time_ns = kind == FlightEvent::Kind::message ? connection.last_progress_ns : 0;
  if (about != nullptr) {
    event.unit = about->unit;
    event.chunk = about->chunk;
    event.step = about->step;
    event.bytes = about->payload_bytes;
  }
  recorder_.note(event);
}

/// Returns those of the chunk's missing ranks from which nothing has come since then. A rank that still sends anything
/// may be on a slow network. A rank whose part may not come yet waits for others. A machine is silent if all its ranks
/// are, since any of them may be the one that pushes.
std::vector<std::uint32_t> ServerCore::silent_ranks(const Job& job, const OpenChunk& chunk, std::int64_t since_ns) {
  const auto lives = [since_ns](const Connection* connection) {
    return connection->waiting || connection->last_progress_ns > since_ns;
  };
  std::set<std::uint32_t> live_hosts;
  for (const Connection* connection : job.connections)
    if (chunk.by_host && connection->host && lives(connection)) live_hosts.insert(connection->host->index);
  std::vector<std::uint32_t> silent = chunk.missing_ranks;
  std::erase_if(silent, [&](std::uint32_t rank) {
    return std::ranges::any_of(job.of_rank(rank), [&](const Connection* connection) {
      return chunk.by_host ? live_hosts.contains(connection->host->index) : lives(connection);
    });
  });
  return silent;
}

void ServerCore::tell_overdue(Job& job, const OpenChunk& chunk, const std::vector<std::uint32_t>& silent) {
  const Status status(
      ErrorCode::timeout,
      concat("waiting for the push of ", chunk.by_host ? "the machine of rank " : "rank ", text_of(silent), " since ",
             (now_ns() - chunk.started_ns) / 1'000'000,
             " ms; the rank is stopped, far behind or disconnected: see its output, or raise POSEIDON_TIMEOUT"));
  FlightEvent event;
  event.kind = FlightEvent::Kind::overdue;
  event.party = FlightEvent::Party::worker;
  event.index = silent.front();
  event.unit = chunk.about.unit;
  event.chunk = chunk.about.chunk;
  event.step = chunk.about.step;
  recorder_.note(event);
  remember_open_chunks(job);
  for (Connection* connection : job.connections) connection->refuse(chunk.about, status);
  if (handover_ != nullptr) handover_->refuse_guests(job.name, chunk.about, status);
  tell_failure(job, FailureSource::silent, silent.front(), status);
}

/// Notes that a rank has said goodbye over a connection, or that such a connection has closed. When it has said so over
/// all, no step that lacks its part can end any more, neither an open one nor a later one. Steps that have its part
/// can: it stays connected until they do. If it is lost before, they lack its part, too.
void ServerCore::note_departure(Job& job, std::uint32_t rank) {
  if (stopping_ || handover_ != nullptr) return;
  if (const auto current = jobs_.find(job.name); current == jobs_.end() || current->second.get() != &job) return;
  const auto stays = [](const Connection* other) { return !other->said_goodbye; };
  if (std::ranges::any_of(job.of_rank(rank), stays)) return;
  job.departed.insert(rank);
  const auto open = job.shard.open_chunks(INT64_MAX);
  const auto waits = [rank](const OpenChunk& chunk) {
    return std::ranges::find(chunk.missing_ranks, rank) != chunk.missing_ranks.end();
  };
  const auto first = std::ranges::find_if(open, waits);
  if (first == open.end()) return;
  remember_open_chunks(job);
  for (Connection* connection : job.connections) refuse_for_departed(*connection, first->about, rank);
  tell_failure(job, FailureSource::left, rank, departed_status(rank));
}

/// Tells the sender of a contribution if its chunk's step waits for a rank that has said goodbye.
void ServerCore::refuse_if_departed(Connection& from, const wire::Envelope& contribution) {
  const auto awaited = from.job->shard.awaited_ranks(contribution);
  const auto& departed = from.job->departed;
  const auto rank = std::ranges::find_if(awaited, [&departed](std::uint32_t one) { return departed.contains(one); });
  if (rank != awaited.end()) refuse_for_departed(from, contribution, *rank);
}

void ServerCore::refuse_for_departed(Connection& to, const wire::Envelope& about, std::uint32_t rank) {
  to.refuse(about, wire::Refuse{departed_status(rank), rank});
}

/// Called at the first sign of a failure, because soon the workers' connections end and what they have pushed is lost.
void ServerCore::remember_open_chunks(Job& job) {
  if (!std::exchange(job.failing, true)) remembered_ = job.open_chunks(INT64_MAX);
}

void ServerCore::tell_lost(const Connection& connection, const Status& status) {
  remember_open_chunks(*connection.job);
  if (status.code() == ErrorCode::peer_lost)
    tell_failure(*connection.job, FailureSource::lost, connection.rank,
                 status.with_context(concat("the server lost rank ", connection.rank)));
}

void ServerCore::tell_failure(const Job& job, FailureSource source, std::uint32_t rank, const Status& status) const {
  if (surroundings_.on_failure && !stopping_)
    surroundings_.on_failure({job.name.name, job.generation, job.worker_count, source, rank, status});
}

void ServerCore::report(JsonWriter& json, std::int64_t time_ns) {
  loop_->check_other_thread();
  FlightEvents events;
  std::vector<ConnectionReport> connections;
  std::vector<OpenChunk> open;
  loop_->call([&] {
    events = recorder_.events();
    for (const auto& [flow, connection] : connections_) {
      ConnectionReport& report = connections.emplace_back();
      if (connection->job != nullptr) {
        report.job = connection->job->name.name;
        report.rank = connection->rank;
      }
      report.flow_index = connection->flow_index;
      report.priority_class = connection->priority_class;
      report.address = flow->peer_name();
      report.last_progress_ns = connection->last_progress_ns;
      report.traffic = flow->traffic();
    }
    open = remembered_;
    for (const auto& [name, job] : jobs_)
      if (!job->failing) std::ranges::move(job->open_chunks(INT64_MAX), std::back_inserter(open));
  });
  json.begin_object().key("connections").begin_array();
  for (const auto& connection : connections) write_connection(json, connection, time_ns);
  json.end_array().field("open_chunk_count", open.size()).key("open_chunks").begin_array();
  for (std::size_t i = 0; i < std::min(open.size(), kMostChunks); ++i) write_chunk(json, open[i], time_ns);
  json.end_array().key("loop");
  write_events(json, concat("server core ", surroundings_.index), events, time_ns);
  json.end_object();
}

}  // namespace poseidon
