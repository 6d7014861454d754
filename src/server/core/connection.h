// Connection: one flow of a worker to a server core; and the jobs that they belong to.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "server/chunk/limits.h"
#include "server/chunk/requester.h"
#include "server/core/fair_share.h"
#include "server/core/server_core.h"
#include "wire/messages.h"

namespace poseidon {

/// Loop thread of its core only.
class ServerCore::Connection final : public Requester {
 public:
  Connection(std::uint64_t id, std::shared_ptr<Flow> flow, FlightRecorder& recorder)
      : id_(id), flow_(std::move(flow)), recorder_(recorder) {}

  void send(const wire::Header& header, std::shared_ptr<const Buffer> payload) override {
    std::vector<std::span<const std::byte>> pieces;
    if (payload) pieces.push_back(payload->span());
    note(FlightEvent::Kind::sent, header, payload ? payload->size() : 0);
    backlog_->add();
    flow_->send(header, std::move(pieces), [payload, backlog = backlog_](const Status&) { backlog->remove(); });
  }
  void refuse(const wire::Envelope& about, const Status& status) override { refuse(about, {status, std::nullopt}); }
  void refuse(const wire::Envelope& about, const wire::Refuse& refusal_of_it) {
    note(FlightEvent::Kind::refused, about, 0);
    if (backlog_->refusals >= limits::kUnsentRefusals) return;
    ++backlog_->refusals;
    send_text(refusal_of_it.make(about), [backlog = backlog_] { --backlog->refusals; });
  }
  void send_text(const wire::TextMessage& message, const std::function<void()>& sent) {
    flow_->send(message.header, {message.payload()}, [text = message.text, sent](const Status&) { sent(); });
  }

  std::uint64_t id() const { return id_; }
  Flow& flow() { return *flow_; }

  /// It has said hello. What it does not read of its answers is charged to the job.
  void join(Job& its_job);

  const Clock::time_point since = Clock::now();
  Job* job = nullptr;  // null until its hello
  std::uint32_t rank = 0;
  std::uint32_t flow_index = 0;
  std::uint32_t priority_class = 0;
  std::int64_t last_progress_ns = now_ns();
  bool left = false;          // it has said that it ends
  bool said_goodbye = false;  // of its own accord, and not because it has failed
  Buffer text;                // of a hello, rule or abort
  Buffer receiving;  // where an assignment, a contribution that others own or a refused one lands; from the pool
  Status refusal;    // of the contribution that is being received
  std::optional<wire::Envelope> waiting;  // of a contribution that may not come yet
  bool in_shard = false;                  // the contribution that is being received lands in this core's shard

 private:
  /// What has been sent and not left yet; a message may be done when its connection is gone.
  struct Backlog {
    std::size_t refusals = 0;
    std::size_t messages = 0;
    std::shared_ptr<BufferPool> pool;  // null until the hello, before which nothing but a refusal is sent

    void add() {
      if (++messages % limits::kMessagesCounted == 0) pool->charge(limits::kMessagesCounted * limits::kMessageBytes);
    }
    void remove() {
      if (messages-- % limits::kMessagesCounted == 0) pool->release(limits::kMessagesCounted * limits::kMessageBytes);
    }
  };

  void note(FlightEvent::Kind kind, const wire::Envelope& about, std::uint64_t bytes) {
    FlightEvent event;
    event.kind = kind;
    event.what = wire::kind_name(about.kind);
    event.party = FlightEvent::Party::worker;
    event.index = rank;
    event.lane = static_cast<std::uint16_t>(flow_index);
    event.unit = about.unit;
    event.chunk = about.chunk;
    event.step = about.step;
    event.bytes = bytes;
    recorder_.note(event);
  }

  const std::uint64_t id_;
  const std::shared_ptr<Flow> flow_;
  FlightRecorder& recorder_;  // the core's
  const std::shared_ptr<Backlog> backlog_ = std::make_shared<Backlog>();
};

/// One generation of one run of a job, its chunks and workers: from its first hello until its last connection has gone.
struct ServerCore::Job {
  Job(JobName job_name, const wire::Hello& first, Reduction reduction, ShardThreads threads,
      std::shared_ptr<MemoryBudget> budget)
      : name(std::move(job_name)),
        worker_count(first.worker_count),
        generation(first.generation),
        run(first.run),
        pace(first.pace.value_or(wire::Pace())),
        shard(first.worker_count, reduction, threads, std::move(budget)) {}

  /// Whether a worker that says so ends it: one of a later generation or, where `runs_follow`, of another run when this
  /// one has lost workers, so that it cannot go on.
  bool ends_with(const wire::Hello& hello, bool runs_follow) const {
    const bool follows = runs_follow && generation == hello.generation && run != hello.run;
    return generation < hello.generation || (follows && !is_whole());
  }
  bool is_whole() const;
  /// Why a connection cannot be one more of this job's; empty: it can.
  std::string objection(const wire::Hello& hello) const;

  const JobName name;
  const std::uint32_t worker_count;
  const std::uint32_t generation;
  const std::string run;
  std::vector<std::string> earlier_runs;  // that it has taken the place of, the last ones
  const wire::Pace pace;
  std::set<Connection*> connections;
  std::set<Connection*> waiting;     // those of them whose next contribution may not come yet
  bool failing = false;              // its open chunks have been remembered
  std::set<std::uint32_t> departed;  // ranks that have said goodbye on all connections
  std::size_t guests = 0;            // workers of other cores that push to chunks here (chunk_handover.h)
  FairShare share;
  Shard shard;
};

inline bool ServerCore::Job::is_whole() const {
  std::set<std::uint32_t> ranks;
  for (const Connection* connection : connections) ranks.insert(connection->rank);
  return ranks.size() == worker_count || guests > 0;  // of those on other cores nothing is known here
}

inline std::string ServerCore::Job::objection(const wire::Hello& hello) const {
  if (run != hello.run)
    return "this server serves another run of job '" + name.name +
           "'; give one of the two another name (job), or wait " + "until the other has ended";
  const std::string rank = "rank " + std::to_string(hello.rank);
  std::size_t count = 0;
  for (const Connection* other : connections) {
    if (other->rank != hello.rank) continue;
    ++count;
    if (other->flow_index == hello.flow && other->priority_class == hello.priority_class)
      return rank + " is connected already; two processes have the same RANK";
  }
  return count < limits::kConnectionsPerRank ? "" : rank + " has " + std::to_string(count) + " connections already";
}

inline void ServerCore::Connection::join(Job& its_job) {
  job = &its_job;
  its_job.connections.insert(this);
  backlog_->pool = its_job.shard.pool().shared_from_this();
}

}  // namespace poseidon
