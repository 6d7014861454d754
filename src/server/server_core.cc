#include "server/server_core.h"

#include <algorithm>

#include "base/clock.h"
#include "server/connection.h"
#include "transport/traffic_class.h"

namespace poseidon {

namespace {

constexpr auto kLinger = std::chrono::seconds(2);
constexpr auto kShortestPause = std::chrono::milliseconds(5);
constexpr std::uint32_t kMaxWorkers = 1u << 16;

bool is_contribution(const wire::Header& header) {
  return header.kind == wire::Kind::push || header.kind == wire::Kind::factors;
}

/// Small messages that end with their handling, and assignments, whose data is copied.
bool is_request(const wire::Header& header) {
  return header.kind == wire::Kind::rule || header.kind == wire::Kind::assign || header.kind == wire::Kind::pull;
}

}  // namespace

ServerCore::ServerCore(const Options& options, std::shared_ptr<Loop> loop, Surroundings surroundings)
    : options_(options), surroundings_(std::move(surroundings)), loop_(std::move(loop)) {
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
  auto listener = transport.listen(*loop_, address, [this](std::shared_ptr<Flow> flow) { accept(std::move(flow)); });
  if (!listener.ok()) return listener.status();
  listeners_.push_back(std::move(listener.value()));
  return listeners_.back()->address();
}

void ServerCore::begin_shutdown(std::chrono::milliseconds linger) {
  if (std::exchange(shut_down_, true)) return;
  listeners_.clear();
  loop_->call([this, linger] {
    stopping_ = true;
    if (connections_.empty()) all_closed_.set_value();
    wire::Header goodbye;
    goodbye.kind = wire::Kind::goodbye;
    goodbye.priority = wire::kLastPriority;
    for (auto& [key, connection] : connections_) {
      connection->flow().send(goodbye, {}, [](const Status&) {});
      connection->flow().close(linger);
    }
  });
}

void ServerCore::finish_shutdown(std::chrono::milliseconds linger) {
  if (auto closed = std::exchange(closed_, {}); closed.valid()) closed.wait_for(linger + kLinger);
}

std::pair<std::uint64_t, std::uint64_t> ServerCore::traffic() {
  std::pair<std::uint64_t, std::uint64_t> bytes;
  loop_->call([this, &bytes] {
    bytes = {closed_bytes_sent_, closed_bytes_received_};
    for (const auto& [key, connection] : connections_) {
      bytes.first += connection->flow().bytes_sent();
      bytes.second += connection->flow().bytes_received();
    }
  });
  return bytes;
}

void ServerCore::accept(std::shared_ptr<Flow> flow) {
  Flow& accepted = *flow;
  connections_[&accepted] = std::make_unique<Connection>(next_connection_id_++, std::move(flow));
  accepted.set_receiver(this);
  if (stopping_) accepted.close(kLinger);
}

Result<std::span<std::byte>> ServerCore::on_header(Flow& flow, const wire::Header& header) {
  Connection& connection = *connections_.at(&flow);
  const bool text =
      header.kind == wire::Kind::hello || header.kind == wire::Kind::abort || header.kind == wire::Kind::rule;
  const bool data = is_contribution(header) || header.kind == wire::Kind::assign;
  if (text ? header.payload_bytes > wire::kMaxTextBytes
           : !data || connection.job == nullptr || header.rank != connection.rank)
    return Status(ErrorCode::refused, flow.peer_name() + " does not speak as a worker of this job");
  connection.refusal = Status();
  connection.in_shard = is_contribution(header) && !hands_over(header);
  if (connection.in_shard) {
    auto place = connection.job->shard.begin(header, connection);
    if (place.ok()) return place;
    // Refused: the rest of what this worker sends goes on, so the payload has to be taken.
    connection.in_shard = false;
    connection.refusal = place.status();
  }
  connection.receiving = text ? Buffer(header.payload_bytes) : connection.job->shard.pool().take(header.payload_bytes);
  return connection.receiving.span();
}

void ServerCore::on_progress(Flow& flow, const wire::Header& header, std::size_t received_bytes) {
  Connection& connection = *connections_.at(&flow);
  if (connection.in_shard) connection.job->shard.progress(header, received_bytes);
}

Status ServerCore::on_message(Flow& flow, const wire::Header& header, std::span<const std::byte> payload,
                              std::function<void()> release) {
  Connection& connection = *connections_.at(&flow);
  const bool for_job = is_contribution(header) || is_request(header);
  if (for_job && (connection.job == nullptr || header.rank != connection.rank))
    return {ErrorCode::refused, flow.peer_name() + " speaks before its hello or for another rank than its own"};
  if (is_contribution(header)) {
    if (Status status = contribute(connection, header, payload, std::move(release)); !status.ok())
      connection.refuse(header, status);
    return {};
  }
  Status status;
  if (header.kind == wire::Kind::hello) {
    status = greet(connection, header, payload);
  } else if (is_request(header)) {
    if (const Status refusal = request(connection, header, payload); !refusal.ok()) connection.refuse(header, refusal);
    if (connection.receiving && header.kind == wire::Kind::assign)
      connection.job->shard.pool().give_back(std::move(connection.receiving));
  }
  if (release) release();
  return status;
}

Status ServerCore::contribute(Connection& connection, const wire::Header& header, std::span<const std::byte> payload,
                              std::function<void()> release) {
  Shard& shard = connection.job->shard;
  const bool received = !payload.empty() && !release;  // then on_header came before
  if (received && !connection.refusal.ok()) {
    shard.pool().give_back(std::move(connection.receiving));
    return std::exchange(connection.refusal, Status());
  }
  if (hands_over(header)) {
    hand_over(connection, header, payload, std::move(release));
    return {};
  }
  if (!received) return shard.add(header, connection, payload, std::move(release));
  shard.complete(header);
  return {};
}

Status ServerCore::request(Connection& connection, const wire::Header& header, std::span<const std::byte> payload) {
  Shard& shard = connection.job->shard;
  if (options_.assignment == Assignment::worker && surroundings_.peers().size() > 1)
    return {ErrorCode::refused, "a server with assignment=worker, which is a baseline, keeps no values"};
  if (header.kind == wire::Kind::rule) return shard.set_rule(header, payload);
  if (header.kind == wire::Kind::assign) return shard.assign(header, payload);
  return shard.pull(header, connection);
}

std::string ServerCore::objection(const wire::Hello& hello) const {
  const auto job = jobs_.find(hello.job);
  const bool embedded = options_.world_size > 0;
  const std::uint32_t expected = job != jobs_.end() ? job->second->worker_count
                                 : embedded         ? static_cast<std::uint32_t>(options_.world_size)
                                                    : hello.worker_count;
  if (embedded && hello.job != options_.job)
    return "this server works for job '" + options_.job + "', not '" + hello.job + "'";
  if (hello.worker_count != expected || hello.rank >= expected || expected > kMaxWorkers)
    return "this server serves " + std::to_string(expected) + " workers of job '" + hello.job + "', not rank " +
           std::to_string(hello.rank) + " of " + std::to_string(hello.worker_count);
  if (job == jobs_.end()) return "";
  for (const Connection* other : job->second->connections)
    if (other->rank == hello.rank && other->flow_index == hello.flow && other->priority_class == hello.priority_class)
      return "rank " + std::to_string(hello.rank) + " is connected already; two processes have the same RANK";
  return "";
}

ServerCore::Job& ServerCore::job_of(const std::string& name, std::uint32_t worker_count) {
  auto& job = jobs_[name];
  if (!job)
    job = std::make_unique<Job>(name, worker_count, Reduction{options_.aggregation, options_.reduce_order},
                                WideThreads{surroundings_.executor, loop_.get()});
  return *job;
}

Status ServerCore::greet(Connection& connection, const wire::Header& header, std::span<const std::byte> payload) {
  const wire::Hello hello = wire::read_hello(header, payload);
  const std::string why = connection.job != nullptr ? "a second hello" : objection(hello);
  if (!why.empty()) {
    connection.refuse(header, {ErrorCode::refused, why});
    connection.flow().close(kLinger);
    return {};
  }
  connection.job = &job_of(hello.job, hello.worker_count);
  connection.job->connections.insert(&connection);
  connection.rank = hello.rank;
  connection.flow_index = hello.flow;
  connection.priority_class = hello.priority_class;
  // Where the system does not permit it, the worker at the other end has said so.
  static_cast<void>(connection.flow().set_traffic_class(traffic_class_of(options_, hello.priority_class)));
  tell_peers([home = this, id = connection.id(), hello](ServerCore& peer) {
    Job& job = peer.job_of(hello.job, hello.worker_count);
    job.remote[id + home->surroundings_.index * kRemoteIdStride] =
        std::make_unique<RemoteWorker>(*home, id, peer.loop());
  });
  const wire::TextMessage answer =
      wire::make_hello({0, hello.worker_count, hello.job, hello.flow, other_cores_, hello.priority_class});
  connection.flow().send(answer.header, {answer.payload()}, [text = answer.text](const Status&) {});
  return {};
}

void ServerCore::on_closed(Flow& flow, const Status&) {
  const auto found = connections_.find(&flow);
  Connection& connection = *found->second;
  closed_bytes_sent_ += flow.bytes_sent();
  closed_bytes_received_ += flow.bytes_received();
  if (Job* job = connection.job) {
    job->shard.drop(connection);
    job->connections.erase(&connection);
    tell_peers([home = this, id = connection.id(), name = job->name](ServerCore& peer) {
      const auto known = peer.jobs_.find(name);
      if (known == peer.jobs_.end()) return;
      Job& remote_job = *known->second;
      const auto worker = remote_job.remote.find(id + home->surroundings_.index * kRemoteIdStride);
      if (worker == remote_job.remote.end()) return;
      remote_job.shard.drop(*worker->second);
      remote_job.remote.erase(worker);
      peer.end_if_empty(remote_job);
    });
    end_if_empty(*job);
  }
  connections_.erase(found);
  if (stopping_ && connections_.empty()) all_closed_.set_value();
}

void ServerCore::end_if_empty(Job& job) {
  if (job.connections.empty() && job.remote.empty()) jobs_.erase(std::string(job.name));
}

void ServerCore::check_overdue() {
  // Workers give up after `timeout`; the one that can name the missing ranks speaks shortly before.
  const auto patience = options_.timeout * 9 / 10;
  const std::int64_t before = now_ns() - std::chrono::nanoseconds(patience).count();
  for (auto& [name, job] : jobs_) {
    job->shard.for_each_overdue(before, [&job = *job](const wire::Header& about, const std::string& why) {
      for (Connection* connection : job.connections) connection->refuse(about, {ErrorCode::timeout, why});
      for (auto& [id, worker] : job.remote) worker->refuse(about, {ErrorCode::timeout, why});
    });
  }
  const auto pause = std::clamp<std::chrono::milliseconds>(patience / 9, kShortestPause, std::chrono::seconds(5));
  loop_->call_at(Clock::now() + pause, [this] { check_overdue(); });
}

bool ServerCore::hands_over(const wire::Header& header) const {
  return options_.assignment == Assignment::worker && &owner_of(header) != this;
}

ServerCore& ServerCore::owner_of(const wire::Header& header) const {
  const auto& peers = surroundings_.peers();
  return *peers[(std::size_t{header.unit} + header.chunk) % peers.size()];
}

void ServerCore::tell_peers(const std::function<void(ServerCore&)>& what) {
  if (options_.assignment != Assignment::worker) return;
  for (const auto& peer : surroundings_.peers())
    if (peer.get() != this) peer->loop_->post([&core = *peer, what] { what(core); });
}

void ServerCore::hand_over(Connection& connection, const wire::Header& header, std::span<const std::byte> payload,
                           std::function<void()> release) {
  if (connection.receiving && !release) {
    // Its memory goes back to this core's pool when the owner has added it.
    const auto held = std::make_shared<Buffer>(std::move(connection.receiving));
    release = [this, held, pool = connection.job->shard.pool().shared_from_this()] {
      loop_->post([held, pool] { pool->give_back(std::move(*held)); });
    };
  }
  ServerCore& owner = owner_of(header);
  const std::uint64_t id = connection.id() + surroundings_.index * kRemoteIdStride;
  owner.loop_->post([&owner, name = connection.job->name, id, header, payload, release = std::move(release)] {
    owner.take_over(name, id, header, payload, release);
  });
}

void ServerCore::take_over(const std::string& name, std::uint64_t remote_id, const wire::Header& header,
                           std::span<const std::byte> payload, std::function<void()> release) {
  const auto job = jobs_.find(name);
  const auto worker = job == jobs_.end() ? decltype(job->second->remote.end())() : job->second->remote.find(remote_id);
  if (job == jobs_.end() || worker == job->second->remote.end()) {
    if (release) release();
    return;  // it has gone meanwhile
  }
  if (Status status = job->second->shard.add(header, *worker->second, payload, std::move(release)); !status.ok())
    worker->second->refuse(header, status);
}

void ServerCore::with_connection(std::uint64_t connection_id, const std::function<void(Connection&)>& what) {
  for (auto& [flow, connection] : connections_)
    if (connection->id() == connection_id) return what(*connection);
}

}  // namespace poseidon
