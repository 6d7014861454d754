#include "server/core/server_core.h"

#include <algorithm>
#include <iterator>

#include "base/clock.h"
#include "base/invariant.h"
#include "base/memory_guard.h"
#include "server/core/connection.h"
#include "transport/admission.h"

namespace poseidon {

namespace {

constexpr auto kLook = std::chrono::milliseconds(100);
// How long a peer that still has something to take at the end may take nothing.
constexpr auto kLongestSilence = std::chrono::seconds(4);
constexpr auto kShortestPause = std::chrono::milliseconds(5);

wire::Handling handling_of(const wire::Header& header) {
  return wire::handling_of(header.kind, wire::Direction::to_server);
}

bool is_contribution(const wire::Header& header) { return handling_of(header) == wire::Handling::exchanged; }

Result<std::span<std::byte>> other_way() {
  return Status(ErrorCode::refused,
                "other ranks take another scheme for it in this step; give the layer the same scheme on all ranks");
}

// Machines are counted from 0 like ranks where their sums are added.
constexpr const char* kOfMachines = "in the sums of machines, whose numbers stand for ranks here";

std::string text_of_message(const wire::Header& header) {
  return concat("a ", wire::kind_name(header.kind), " of ", header.payload_bytes, " bytes from rank ", header.rank);
}

}  // namespace

ServerCore::ServerCore(const Options& options, std::shared_ptr<Loop> loop, Surroundings surroundings)
    : options_(options),
      surroundings_(std::move(surroundings)),
      loop_(std::move(loop)),
      pending_(*loop_, std::max(limits::kPendingConnections, expected_connections(options_)),
               std::min<std::chrono::milliseconds>(limits::kHelloPatience, options_.timeout)),
      port_watch_(*loop_) {
  loop_->post([this] { check_overdue(); });
}

ServerCore::~ServerCore() {
  begin_shutdown(kLinger);
  finish_shutdown(kLinger);
  loop_->stop();
}

void ServerCore::set_other_cores(std::vector<std::string> addresses) {
  loop_->call([&] { other_cores_ = std::move(addresses); });
}

Result<std::string> ServerCore::listen(Transport& transport, const std::string& address) {
  auto listener = transport.listen(*loop_, address, [this](std::shared_ptr<Flow> flow) { connected(std::move(flow)); });
  if (!listener.ok()) return listener.status();
  listeners_.push_back(std::move(listener.value()));
  return listeners_.back()->address();
}

void ServerCore::begin_shutdown(std::chrono::milliseconds linger) {
  if (std::exchange(shut_down_, true)) return;
  listeners_.clear();
  loop_->call([this, linger] {
    stopping_ = true;
    if (connections_.empty()) all_closed_.complete();
    for (auto& [key, connection] : connections_) {
      connection->flow().send(wire::Goodbye::make(), {}, [](const Status&) {});
      connection->flow().close(linger);
    }
  });
}

void ServerCore::finish_shutdown(std::chrono::milliseconds linger) {
  if (std::exchange(finished_, true)) return;
  const auto latest = Clock::now() + linger + kLinger;
  // A peer that takes nothing any more is frozen or cut off. The kernel goes on sending what it holds for such a peer.
  std::uint64_t delivered_bytes = bytes_delivered();
  auto quiet_since = Clock::now();
  while (!all_closed_.wait_for(kLook)) {
    const auto now = Clock::now();
    if (const std::uint64_t by_now = bytes_delivered(); std::exchange(delivered_bytes, by_now) != by_now)
      quiet_since = now;
    if (now > latest || now - quiet_since > kLongestSilence) return;
  }
}

std::uint64_t ServerCore::bytes_delivered() {
  return loop_->call([this] {
    std::uint64_t bytes = closed_traffic_.bytes_sent;
    for (const auto& [key, connection] : connections_) bytes += connection->flow().bytes_delivered();
    return bytes;
  });
}

TrafficStats ServerCore::traffic() {
  loop_->check_other_thread();
  return loop_->call([this] {
    TrafficStats stats = closed_traffic_;
    for (const auto& [flow, connection] : connections_) stats += flow->traffic();
    return stats;
  });
}

std::vector<LateRank> ServerCore::late_ranks() {
  loop_->check_other_thread();
  return loop_->call([this] {
    std::vector<LateRank> ranks;
    for (const auto& [name, job] : jobs_) std::ranges::copy(job->shard.pace().late_ranks(), std::back_inserter(ranks));
    return ranks;
  });
}

void ServerCore::connected(std::shared_ptr<Flow> flow) {
  loop_->check_thread();
  Flow& accepted = *flow;
  auto& connection = connections_[&accepted];
  connection = std::make_unique<Connection>(next_connection_id_++, std::move(flow), recorder_);
  note(FlightEvent::Kind::connected, *connection, "");
  accepted.set_context(connection.get());
  accepted.set_receiver(this);
  if (stopping_) return accepted.close(kLinger);
  port_watch_.add(connection->id(), accepted);
  pending_.add(connection->id(), accepted);
}

/// Whether the message is from the machine on which the sender runs.
bool ServerCore::speaks_for_host(const Connection& connection, const wire::Header& header) {
  return connection.job != nullptr && connection.host &&
         header.rank == connection.job->worker_count + std::uint64_t{connection.host->index};
}

/// Whether a worker may send this message now. A worker contributes and asks only for its own rank and its machine.
Status ServerCore::check_place(Connection& connection, const wire::Header& header) {
  if (Status status = wire::check_kind(header.kind, wire::Direction::to_server, header.payload_bytes); !status.ok())
    return {ErrorCode::refused, connection.flow().peer_name() + ": " + status.message()};
  const bool for_rank = handling_of(header) != wire::Handling::handled;
  if (header.kind == wire::Kind::hello || (connection.job != nullptr && (!for_rank || header.rank == connection.rank)))
    return {};
  if (speaks_for_host(connection, header)) return {};
  return {ErrorCode::refused,
          connection.flow().peer_name() + " sent a message before its hello, or in the name of another rank"};
}

bool ServerCore::begin_turn(Flow& flow) {
  loop_->check_thread();
  Job* job = flow.context<Connection>().job;
  sharing_ = job != nullptr && jobs_.size() > 1;
  return !sharing_ || job->share.begin(loop_->round(), now_ns());
}

void ServerCore::end_turn(Flow& flow) {
  loop_->check_thread();
  if (sharing_) flow.context<Connection>().job->share.end(now_ns());
}

bool ServerCore::may_receive(Flow& flow, const wire::Header& header) {
  loop_->check_thread();
  Connection& connection = flow.context<Connection>();
  heard(connection, header);
  Job* job = connection.job;
  if (job == nullptr || handling_of(header) == wire::Handling::handled || stopping_) return true;
  if (job->is_ahead())
    resume_at(job->rate->free_at_ns());
  else if (!waits_for_others(connection, header))
    return true;
  connection.waiting = header;
  job->waiting.insert(&connection);
  return false;
}

/// Whether the message is a contribution that its shard does not take yet.
bool ServerCore::waits_for_others(const Connection& connection, const wire::Header& header) const {
  const bool shards = is_contribution(header) && header.payload_bytes > 0 && !is_elsewhere(header) &&
                      (header.rank == connection.rank || speaks_for_host(connection, header));
  return shards && !connection.job->may_receive(header);
}

/// Looks again at what waits of a job: after a part of a contribution has come or gone, and after some time.
void ServerCore::resume_waiting(Job& job) {
  if (job.waiting.empty()) return;
  if (job.is_ahead()) return resume_at(job.rate->free_at_ns());
  std::erase_if(job.waiting, [this](Connection* connection) {
    if (waits_for_others(*connection, *connection->waiting)) return false;
    connection->waiting.reset();
    connection->flow().resume();
    return true;
  });
}

Result<std::span<std::byte>> ServerCore::accept(Flow& flow, const wire::Header& header, bool lent) {
  loop_->check_thread();
  bool no_memory = false;
  const auto what = [&] {
    no_memory = true;
    return text_of_message(header);
  };
  auto place = guard_memory([&] { return place_for(flow, header, lent); }, what);
  if (no_memory) flow.context<Connection>().refuse(header, place.status());
  return place;
}

Result<std::span<std::byte>> ServerCore::place_for(Flow& flow, const wire::Header& header, bool lent) {
  Connection& connection = flow.context<Connection>();
  heard(connection, header);
  if (Status status = check_place(connection, header); !status.ok()) return status;
  connection.refusal = Status();
  connection.in_shard = false;
  if (lent || header.payload_bytes == 0) return std::span<std::byte>();
  if (wire::has_text(header.kind)) {
    connection.text = Buffer(header.payload_bytes);
    return connection.text.span();
  }
  Shard& shard = connection.job->shard;
  if (is_contribution(header) && !is_elsewhere(header)) {
    Job& job = *connection.job;
    auto place = job.pushed_otherwise(header)
                     ? other_way()
                     : job.shard_of(header).begin(wire::Contribution::read(job.inner(header)), connection);
    connection.in_shard = place.ok();
    resume_waiting(*connection.job);
    if (place.ok()) return place;
    connection.refusal = place.status();
  }
  // The contribution is refused, but its payload still arrives, so there must be memory for it.
  connection.receiving = shard.pool().try_take(header.payload_bytes);
  if (connection.receiving) return connection.receiving.span();
  if (connection.refusal.ok()) connection.refusal = shard.no_room(header.payload_bytes);
  connection.refuse(header, connection.refusal);
  flow.close(kLinger);
  return connection.refusal;
}

void ServerCore::on_progress(Flow& flow, const wire::Header& header, std::size_t received_bytes) {
  loop_->check_thread();
  Connection& connection = flow.context<Connection>();
  heard(connection, header);
  if (!connection.in_shard) return;
  Job& job = *connection.job;
  job.shard_of(header).progress(job.inner(header), received_bytes);
  resume_waiting(*connection.job);
}

Status ServerCore::on_message(Flow& flow, const wire::Header& header, std::span<const std::byte> payload,
                              std::function<void()> release) {
  loop_->check_thread();
  bool no_memory = false;
  const auto what = [&] {
    no_memory = true;
    return text_of_message(header);
  };
  Status status = guard_memory([&] { return take(flow, header, payload, std::move(release)); }, what);
  // The sender is told why. Then the connection ends, and with it the step that can no longer be completed.
  if (no_memory) flow.context<Connection>().refuse(header, status);
  return status;
}

Status ServerCore::take(Flow& flow, const wire::Header& header, std::span<const std::byte> payload,
                        std::function<void()> release) {
  Connection& connection = flow.context<Connection>();
  heard(connection, header);
  if (header.kind != wire::Kind::heartbeat)
    note(FlightEvent::Kind::message, connection, wire::kind_name(header.kind), &header);
  connection.charge_received(header);
  if (is_contribution(header)) {
    if (!embedded()) port_watch_.watch();  // embedded servers have as many ports as there are workers
    if (Status status = contribute(connection, header, payload, std::move(release)); !status.ok())
      connection.refuse(header, connection.job->by_host(header) ? status.with_context(kOfMachines) : status);
    else if (!connection.job->departed.empty() && !connection.job->by_host(header))
      refuse_if_departed(connection, header);
    resume_waiting(*connection.job);
    return {};
  }
  Status status;
  if (handling_of(header) == wire::Handling::request)
    answer(connection, header, payload);
  else
    status = handle(connection, header, payload);
  if (release) release();
  return status;
}

Status ServerCore::handle(Connection& connection, const wire::Header& header, std::span<const std::byte> payload) {
  switch (header.kind) {
#define POSEIDON_KIND(name, ...)                                                   \
  case wire::Kind::name:                                                           \
    if constexpr (wire::has_handler(wire::Kind::name, wire::Direction::to_server)) \
      return Handlers::name(*this, connection, header, payload);                   \
    break;
#include "wire/kinds.def"
    case wire::Kind::none:
      break;
  }
  return {};  // check_place has refused it
}

/// Handles a request.
void ServerCore::answer(Connection& connection, const wire::Header& header, std::span<const std::byte> payload) {
  Shard& shard = connection.job->shard;
  const Status status = shard.pool().has_room(0) ? handle(connection, header, payload) : shard.no_room(0);
  if (!status.ok()) connection.refuse(header, status);
  if (connection.receiving) shard.pool().give_back(std::move(connection.receiving));
}

/// Returns the shard for a request about values that the server keeps, or says why it keeps none.
Result<Shard*> ServerCore::values_of(Connection& connection, const wire::Envelope& request) const {
  if (handover_ != nullptr)
    return Status(ErrorCode::refused,
                  "a server with the baseline assignment=worker keeps no values; start it with assignment=chunk");
  return &connection.job->shard_of(request);
}

Status ServerCore::contribute(Connection& connection, const wire::Header& header, std::span<const std::byte> payload,
                              std::function<void()> release) {
  Shard& shard = connection.job->shard;
  const bool received = !payload.empty() && !release;  // then accept() has given it a place
  if (received && !connection.refusal.ok()) {
    shard.pool().give_back(std::move(connection.receiving));
    return std::exchange(connection.refusal, Status());
  }
  if (is_elsewhere(header)) {
    if (connection.receiving && !release) release = lend_received(connection);
    handover_->hand_over(connection.job->name, connection.id(), header, payload, std::move(release));
    return {};
  }
  Job& job = *connection.job;
  const auto contribution = wire::Contribution::read(job.inner(header));
  if (!received && job.pushed_otherwise(header)) {
    if (release) release();
    return other_way().status();
  }
  if (!received) return job.shard_of(header).add(contribution, connection, payload, std::move(release));
  job.shard_of(header).complete(contribution);
  return {};
}

void ServerCore::on_closed(Flow& flow, const Status& status) {
  loop_->check_thread();
  const auto found = connections_.find(&flow);
  invariant(found != connections_.end(), "a connection closes once");
  Connection& connection = *found->second;
  note(FlightEvent::Kind::closed, connection, "");
  if (connection.job != nullptr && !connection.left) tell_lost(connection, status);
  closed_traffic_ += flow.traffic();
  pending_.remove(connection.id());
  port_watch_.remove(connection.id());
  if (Job* job = connection.job) {
    job->shard.drop(connection);
    if (job->shard_of_hosts) job->shard_of_hosts->drop(connection);
    job->waiting.erase(&connection);
    resume_waiting(*job);
    if (connection.receiving) job->shard.pool().give_back(std::move(connection.receiving));
    job->leave(connection);
    if (connection.said_goodbye) note_departure(*job, connection.rank);
    if (handover_ != nullptr) handover_->closed(job->name, connection.id());
    end_if_empty(*job);
  }
  connections_.erase(found);
  if (stopping_ && connections_.empty()) all_closed_.complete();
}

void ServerCore::end_if_empty(Job& job) {
  if (!job.connections.empty() || job.guests > 0) return;
  if (const auto found = jobs_.find(job.name); found != jobs_.end() && found->second.get() == &job) {
    if (job.lost_worker) surroundings_.tenants->note_lost(job.name, {job.generation, job.run}, job.worker_count);
    jobs_.erase(found);
  } else {
    std::erase_if(replaced_jobs_, [&job](const auto& replaced) { return replaced.get() == &job; });
  }
}

void ServerCore::check_overdue() {
  loop_->check_thread();
  // Workers give up after this time. The server knows the missing ranks and reports them shortly before.
  const auto patience = longest_wait(options_) * 9 / 10;
  const std::int64_t before = ran_since_ns(patience);
  for (auto& [name, job] : jobs_) {
    for (const OpenChunk& chunk : job->open_chunks(before))
      if (const auto silent = silent_ranks(*job, chunk, before); !silent.empty()) tell_overdue(*job, chunk, silent);
  }
  const auto pause = std::clamp<std::chrono::milliseconds>(patience / 9, kShortestPause, std::chrono::seconds(5));
  loop_->call_at(Clock::now() + pause, [this] { check_overdue(); });
}

void ServerCore::set_handover(std::unique_ptr<ChunkHandover> handover) {
  loop_->call([&] { handover_ = std::move(handover); });
}

Shard* ServerCore::shard_of(const JobName& job) {
  loop_->check_thread();
  const auto found = jobs_.find(job);
  return found == jobs_.end() ? nullptr : &found->second->shard;
}

bool ServerCore::add_guest(const JobName& job, const wire::Hello& hello) {
  loop_->check_thread();
  const auto here = job_of(job, hello);
  if (!here.ok() || here.value()->generation != hello.generation || here.value()->run != hello.run) return false;
  ++here.value()->guests;
  return true;
}

void ServerCore::remove_guest(const JobName& job) {
  loop_->check_thread();
  const auto found = jobs_.find(job);
  invariant(found != jobs_.end() && found->second->guests > 0, "a guest that leaves has come");
  Job& left = *found->second;
  --left.guests;
  end_if_empty(left);
}

Requester* ServerCore::connection(std::uint64_t id) {
  loop_->check_thread();
  for (auto& [flow, connection] : connections_)
    if (connection->id() == id) return connection.get();
  return nullptr;
}

/// Lends what another core reads. When that core has read it, the memory goes back to the job's pool here.
std::function<void()> ServerCore::lend_received(Connection& connection) {
  const auto held = std::make_shared<Buffer>(std::move(connection.receiving));
  return [this, held, pool = connection.job->shard.pool().shared_from_this()] {
    loop_->post([held, pool] { pool->give_back(std::move(*held)); });
  };
}

}  // namespace poseidon
