// Connection: one flow of a worker to a server core. Job: the job to which connections belong.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/one_thread.h"
#include "server/chunk/limits.h"
#include "server/chunk/requester.h"
#include "server/core/fair_share.h"
#include "server/core/server_core.h"
#include "wire/messages/ending.h"
#include "wire/messages/hello.h"

namespace poseidon {

/// Only the loop thread of its core uses it.
class ServerCore::Connection final : public Requester {
 public:
  Connection(std::uint64_t id, std::shared_ptr<Flow> flow, FlightRecorder& recorder)
      : id_(id), flow_(std::move(flow)), recorder_(recorder) {}

  void send(const wire::Header& header, std::shared_ptr<const Buffer> payload) override {
    one_thread_.check();
    Pieces pieces;
    if (payload) pieces.push_back(payload->span());
    note(FlightEvent::Kind::sent, header, payload ? payload->size() : 0);
    backlog_->add();
    flow_->send(
        header, std::move(pieces),
        [payload, backlog = backlog_, settle = charge_sent(header, payload ? payload->size() : 0)](const Status&) {
          backlog->remove();
          if (settle) settle();
        });
  }
  bool codes(std::size_t payload_bytes) const override { return flow_->codes(payload_bytes); }
  void refuse(const wire::Envelope& about, const Status& status) override { refuse(about, {status, std::nullopt}); }
  void refuse(const wire::Envelope& about, const wire::Refuse& refusal_of_it) {
    one_thread_.check();
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

  /// Charges the job for a message that has come, with the bytes that have travelled.
  void charge_received(const wire::Header& header);

  /// Makes it a connection of the job after its hello, which has said its rank. The job is charged for answers that the
  /// connection does not read.
  void join(Job& its_job);

  Job* job = nullptr;  // null until its hello
  std::uint32_t rank = 0;
  std::optional<wire::Hello::Host> host;  // the machine for which the worker may speak, too (Job::by_host)
  std::uint32_t flow_index = 0;
  std::uint32_t priority_class = 0;
  std::int64_t last_progress_ns = now_ns();
  bool left = false;          // the worker has said that it ends
  bool said_goodbye = false;  // the worker leaves of its own accord, and not because it has failed
  Buffer text;                // the text of a hello, rule or abort
  // Memory from the pool for an assignment, and for a contribution that is refused or belongs to others.
  Buffer receiving;
  Status refusal;                       // the refusal of the contribution that is being received
  std::optional<wire::Header> waiting;  // of the message that may not come yet
  bool in_shard = false;                // the contribution that is being received goes to this core's shard

 private:
  /// Counts messages that have been sent but have not left yet. A message may end after its connection has been
  /// destroyed.
  struct Backlog {
    std::size_t refusals = 0;
    std::size_t messages = 0;
    std::uint64_t saved_bytes = 0;     // which coding has saved of the messages that have left
    std::shared_ptr<BufferPool> pool;  // null until the hello; before it, only refusals are sent

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

  /// Charges the job for a message as if it were not coded. What is returned gives back what coding has saved, when the
  /// message has left; it is empty without a limit.
  std::function<void()> charge_sent(const wire::Header& header, std::size_t payload_bytes) const;

  const std::uint64_t id_;
  const std::shared_ptr<Flow> flow_;
  FlightRecorder& recorder_;  // the core's recorder
  const std::shared_ptr<Backlog> backlog_ = std::make_shared<Backlog>();
  std::uint64_t saved_bytes_ = 0;  // which coding has saved of the messages that were charged
  [[no_unique_address]] OneThread one_thread_{"Connection"};
};

/// One generation of one run of a job, with its chunks and workers. It exists from its first hello until its last
/// connection has closed.
struct ServerCore::Job {
  Job(JobName job_name, const wire::Hello& first, Reduction reduction, ShardThreads threads, Allowance allowance)
      : name(std::move(job_name)),
        worker_count(first.worker_count),
        generation(first.generation),
        run(first.run),
        pace(first.pace.value_or(wire::Pace())),
        rate(std::move(allowance.rate)),
        shard(first.worker_count, reduction, threads, allowance.memory),
        shard_of_hosts(first.host ? std::make_unique<Shard>(first.host->count, reduction, threads, allowance.memory)
                                  : nullptr),
        host_count(first.host ? first.host->count : 0) {
    if (shard_of_hosts) shard_of_hosts->take_machines();
  }

  /// Whether a worker with this hello ends the job. A worker of a later generation does. If `runs_follow`, a worker of
  /// another run does, too, when this run has lost workers so that it cannot go on.
  bool ends_with(const wire::Hello& hello, bool runs_follow) const {
    const bool follows = runs_follow && generation == hello.generation && run != hello.run;
    return generation < hello.generation || (follows && !is_whole());
  }
  bool is_whole() const;
  /// Whether a message is from a machine. Its number then follows those of the ranks.
  bool by_host(const wire::Envelope& about) const { return about.rank >= worker_count; }
  /// The message as its shard sees it: machines have numbers from 0 there.
  template <typename Message>
  Message inner(Message message) const {
    if (by_host(message)) message.rank -= worker_count;
    return message;
  }
  Shard& shard_of(const wire::Envelope& about) { return by_host(about) ? *shard_of_hosts : shard; }
  /// Shard::may_receive. Where machines push, what workers push is little, and does not wait: a machine's push may have
  /// to wait for it.
  bool may_receive(const wire::Envelope& about) {
    return (shard_of_hosts && !by_host(about)) || shard_of(about).may_receive(inner(about));
  }
  /// Whether others push the chunk the other way in this step: as workers instead of machines, or the reverse.
  bool pushed_otherwise(const wire::Envelope& about) const {
    return shard_of_hosts && (by_host(about) ? shard : *shard_of_hosts).has_open(about);
  }
  /// Whether the job has moved more than its rate permits.
  bool is_ahead() const { return rate && rate->free_at_ns() > now_ns(); }
  /// The shard whose chunks have values.
  Shard& shard_of_values() { return shard_of_hosts ? *shard_of_hosts : shard; }
  /// The open chunks of both shards that began before the given time. All ranks of a missing machine are missing.
  std::vector<OpenChunk> open_chunks(std::int64_t started_before_ns) const;

  /// Forgets a connection that has closed, but not what it has sent and received.
  void leave(Connection& connection) {
    connections.erase(&connection);
    lost_worker = lost_worker || !connection.said_goodbye;
    last_progress_ns = std::max(last_progress_ns, connection.last_progress_ns);
    closed_traffic += connection.flow().traffic();
  }

  /// clang 14 cannot read the subrange of its standard library.
  template <typename Iterator>
  struct OfRank {
    Iterator first, last;
    Iterator begin() const { return first; }
    Iterator end() const { return last; }
  };
  /// The connections of one rank.
  auto of_rank(std::uint32_t rank) const {
    const auto [first, last] = connections.equal_range(rank);
    return OfRank<decltype(first)>{first, last};
  }
  /// Says why a connection cannot join this job. Empty if it can.
  std::string objection(const wire::Hello& hello) const;

  /// A server of a thousand workers finds those of one rank without a look at all.
  struct ByRank {
    using is_transparent = void;
    bool operator()(const Connection* one, const Connection* other) const {
      return std::pair(one->rank, one->id()) < std::pair(other->rank, other->id());
    }
    bool operator()(const Connection* one, std::uint32_t rank) const { return one->rank < rank; }
    bool operator()(std::uint32_t rank, const Connection* one) const { return rank < one->rank; }
  };

  const JobName name;
  const std::uint32_t worker_count;
  const std::uint32_t generation;
  const std::string run;
  std::vector<std::string> earlier_runs;  // the last runs whose place this run has taken
  const wire::Pace pace;
  std::set<Connection*, ByRank> connections;
  std::set<Connection*, ByRank> waiting;  // those whose next contribution may not come yet
  bool failing = false;                   // its open chunks have been remembered
  bool passed_on = false;                 // its workers have been told why one of them has failed
  bool lost_worker = false;               // a connection has ended without a goodbye
  const std::int64_t began_ns = now_ns();
  std::int64_t last_progress_ns = began_ns;  // of the connections that have closed
  TrafficStats closed_traffic;               // of them
  std::set<std::uint32_t> departed;          // ranks that have said goodbye over all their connections
  std::size_t guests = 0;                    // workers of other cores that push to chunks here (chunk_handover.h)
  FairShare share;
  const std::shared_ptr<RateLimit> rate;  // null: no limit
  Shard shard;
  const std::unique_ptr<Shard> shard_of_hosts;  // for what machines push; null: workers do not speak for them
  const std::uint32_t host_count;
};

inline std::vector<OpenChunk> ServerCore::Job::open_chunks(std::int64_t started_before_ns) const {
  std::vector<OpenChunk> open = shard.open_chunks(started_before_ns);
  if (!shard_of_hosts) return open;
  for (OpenChunk& chunk : shard_of_hosts->open_chunks(started_before_ns)) {
    std::set<std::uint32_t> ranks;
    for (const Connection* one : connections)
      if (one->host && std::ranges::find(chunk.missing_ranks, one->host->index) != chunk.missing_ranks.end())
        ranks.insert(one->rank);
    chunk.missing_ranks.assign(ranks.begin(), ranks.end());
    chunk.by_host = true;
    open.push_back(std::move(chunk));
  }
  return open;
}

inline bool ServerCore::Job::is_whole() const {
  std::size_t rank_count = 0;
  for (auto one = connections.begin(); one != connections.end(); one = connections.upper_bound((*one)->rank))
    ++rank_count;
  return rank_count == worker_count || guests > 0;  // nothing is known here about the workers of other cores
}

inline std::string ServerCore::Job::objection(const wire::Hello& hello) const {
  if (run != hello.run)
    return "this server serves another run of job '" + name.name +
           "'; give one of the two another name (--job NAME or POSEIDON_JOB), or wait until the other has ended";
  const std::string rank = concat("rank ", hello.rank);
  if ((hello.host ? hello.host->count : 0) != host_count)
    return rank + " counts other machines than the job's other ranks do; give all the same reduce_by_host";
  std::size_t count = 0;
  for (const Connection* other : of_rank(hello.rank)) {
    ++count;
    if (other->flow_index == hello.flow && other->priority_class == hello.priority_class)
      return rank + " is connected already; see whether two processes have the same RANK";
  }
  return count < limits::kConnectionsPerRank
             ? ""
             : concat(rank, " has ", count, " connections already; lower flows or priority_classes");
}

inline void ServerCore::Connection::charge_received(const wire::Header& header) {
  if (job == nullptr || !job->rate) return;
  const TrafficStats traffic = flow_->traffic();
  const std::uint64_t saved_bytes = traffic.plain_bytes_received - traffic.bytes_received;
  const std::uint64_t saved_now = saved_bytes - std::exchange(saved_bytes_, saved_bytes);
  job->rate->charge_received(wire::kHeaderBytes + header.payload_bytes - saved_now, now_ns());
}

inline std::function<void()> ServerCore::Connection::charge_sent(const wire::Header& header,
                                                                 std::size_t payload_bytes) const {
  if (job == nullptr || !job->rate) return {};
  const std::uint64_t plain_bytes = header.coding == Coding::none ? payload_bytes : header.payload_bytes;
  job->rate->charge_sent(wire::kHeaderBytes + plain_bytes, now_ns());
  return [rate = job->rate, backlog = backlog_, weak_flow = std::weak_ptr<Flow>(flow_)] {
    const auto flow = weak_flow.lock();
    if (!flow) return;
    const TrafficStats traffic = flow->traffic();
    const std::uint64_t saved_bytes = traffic.plain_bytes_sent - traffic.bytes_sent;
    rate->give_back_sent(static_cast<std::int64_t>(saved_bytes - std::exchange(backlog->saved_bytes, saved_bytes)));
  };
}

inline void ServerCore::Connection::join(Job& its_job) {
  job = &its_job;
  its_job.connections.insert(this);
  backlog_->pool = its_job.shard.pool().shared_from_this();
}

}  // namespace poseidon
