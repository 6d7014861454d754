#include "server/server_impl.h"

#include <algorithm>
#include <utility>

namespace poseidon {

namespace {
constexpr auto kLinger = std::chrono::seconds(2);
constexpr auto kShortestPause = std::chrono::milliseconds(5);
constexpr std::uint32_t kMaxWorkers = 1u << 16;

void send_error(Flow& flow, const wire::Header& about, const Status& status) {
  const wire::TextMessage message = wire::make_error(wire::Kind::refuse, about, status);
  flow.send(message.header, {message.payload()}, [text = message.text](const Status&) {});
}
}  // namespace

ServerImpl::Job::Job(std::string job_name, std::uint32_t count)
    : name(std::move(job_name)),
      worker_count(count),
      shard(count, [this](std::uint32_t rank, const wire::Header& header, const std::shared_ptr<Buffer>& payload) {
        send_result(rank, header, payload);
      }) {}

void ServerImpl::Job::send_result(std::uint32_t rank, const wire::Header& header,
                                  const std::shared_ptr<Buffer>& payload) {
  const auto found = workers.find(rank);
  if (found == workers.end()) return;  // it has gone; the others learn that from their own connections to it
  std::vector<std::span<const std::byte>> pieces;
  if (payload) pieces.push_back(std::as_const(*payload).span());
  found->second->send(header, std::move(pieces), [payload](const Status&) {});
}

ServerImpl::ServerImpl(const Options& options) : options_(options), loop_("psd-server") {
  loop_.post([this] { check_overdue(); });
}

ServerImpl::~ServerImpl() { shutdown(); }

Status ServerImpl::listen(Transport& transport, const std::string& address) {
  auto listener = transport.listen(loop_, address, [this](std::shared_ptr<Flow> flow) { accept(std::move(flow)); });
  if (!listener.ok()) return listener.status();
  if (listeners_.empty()) address_ = listener.value()->address();
  listeners_.push_back(std::move(listener.value()));
  return {};
}

void ServerImpl::shutdown() { shutdown(kLinger); }

void ServerImpl::shutdown(std::chrono::milliseconds linger) {
  if (std::exchange(shut_down_, true)) return;
  listeners_.clear();
  loop_.call([this, linger] {
    stopping_ = true;
    if (connections_.empty()) all_closed_.set_value();
    wire::Header goodbye;
    goodbye.kind = wire::Kind::goodbye;
    for (auto& [key, connection] : connections_) {
      connection.flow->send(goodbye, {}, [](const Status&) {});
      connection.flow->close(linger);
    }
  });
  all_closed_.get_future().wait_for(linger + kLinger);
}

std::pair<std::uint64_t, std::uint64_t> ServerImpl::traffic() {
  std::pair<std::uint64_t, std::uint64_t> bytes;
  loop_.call([this, &bytes] {
    bytes = {closed_bytes_sent_, closed_bytes_received_};
    for (const auto& [key, connection] : connections_) {
      bytes.first += connection.flow->bytes_sent();
      bytes.second += connection.flow->bytes_received();
    }
  });
  return bytes;
}

void ServerImpl::accept(std::shared_ptr<Flow> flow) {
  Flow& accepted = *flow;
  connections_[&accepted].flow = std::move(flow);
  accepted.set_receiver(this);
  if (stopping_) accepted.close(kLinger);
}

Result<std::span<std::byte>> ServerImpl::on_header(Flow& flow, const wire::Header& header) {
  Connection& connection = connections_.at(&flow);
  const bool text = header.kind == wire::Kind::hello || header.kind == wire::Kind::abort;
  const bool contribution = header.kind == wire::Kind::push || header.kind == wire::Kind::factors;
  if (text ? header.payload_bytes > wire::kMaxTextBytes : !contribution || connection.job == nullptr)
    return Status(ErrorCode::refused, flow.peer_name() + " does not speak as a worker of this job");
  connection.receiving = text ? Buffer(header.payload_bytes) : connection.job->shard.pool().take(header.payload_bytes);
  return connection.receiving.span();
}

Status ServerImpl::on_message(Flow& flow, const wire::Header& header, std::span<const std::byte> payload,
                              std::function<void()> release) {
  Connection& connection = connections_.at(&flow);
  Contribution contribution{header, std::exchange(connection.receiving, Buffer()), payload, std::move(release)};
  if (header.kind == wire::Kind::push || header.kind == wire::Kind::factors) {
    if (connection.job == nullptr || static_cast<int>(header.rank) != flow.tag)
      return {ErrorCode::refused, flow.peer_name() + " pushes before its hello or for another rank than its own"};
    if (Status status = connection.job->shard.add(std::move(contribution)); !status.ok())
      send_error(flow, header, status);
    return {};
  }
  Status status = header.kind == wire::Kind::hello ? greet(flow, header, payload) : Status();
  if (contribution.release) contribution.release();
  return status;
}

std::string ServerImpl::objection(const wire::Hello& hello) const {
  const auto job = jobs_.find(hello.job);
  const bool embedded = options_.world_size > 0;
  const std::uint32_t expected = job != jobs_.end() ? job->second.worker_count
                                 : embedded         ? static_cast<std::uint32_t>(options_.world_size)
                                                    : hello.worker_count;
  if (embedded && hello.job != options_.job)
    return "this server works for job '" + options_.job + "', not '" + hello.job + "'";
  if (hello.worker_count != expected || hello.rank >= expected || expected > kMaxWorkers)
    return "this server serves " + std::to_string(expected) + " workers of job '" + hello.job + "', not rank " +
           std::to_string(hello.rank) + " of " + std::to_string(hello.worker_count);
  if (job != jobs_.end() && job->second.workers.contains(hello.rank))
    return "rank " + std::to_string(hello.rank) + " is connected already; two processes have the same RANK";
  return "";
}

Status ServerImpl::greet(Flow& flow, const wire::Header& header, std::span<const std::byte> payload) {
  const wire::Hello hello = wire::read_hello(header, payload);
  Connection& connection = connections_.at(&flow);
  const std::string why = connection.job != nullptr ? "a second hello" : objection(hello);
  if (!why.empty()) {
    send_error(flow, header, {ErrorCode::refused, why});
    flow.close(kLinger);
    return {};
  }
  connection.job = &jobs_.try_emplace(hello.job, hello.job, hello.worker_count).first->second;
  connection.job->workers[hello.rank] = &flow;
  flow.tag = static_cast<int>(hello.rank);
  const wire::TextMessage answer = wire::make_hello({0, hello.worker_count, hello.job});
  flow.send(answer.header, {answer.payload()}, [text = answer.text](const Status&) {});
  return {};
}

void ServerImpl::on_closed(Flow& flow, const Status&) {
  auto found = connections_.find(&flow);
  closed_bytes_sent_ += flow.bytes_sent();
  closed_bytes_received_ += flow.bytes_received();
  if (Job* job = found->second.job) {
    job->workers.erase(static_cast<std::uint32_t>(flow.tag));
    job->shard.drop(static_cast<std::uint32_t>(flow.tag));
    if (job->workers.empty()) jobs_.erase(std::string(job->name));
  }
  connections_.erase(found);
  if (stopping_ && connections_.empty()) all_closed_.set_value();
}

void ServerImpl::check_overdue() {
  // Workers give up after `timeout`; the one that can name the missing ranks speaks shortly before.
  const auto patience = options_.timeout * 9 / 10;
  const std::int64_t before = now_ns() - std::chrono::nanoseconds(patience).count();
  for (auto& entry : jobs_) {
    Job& job = entry.second;
    job.shard.for_each_overdue(before, [&job](const wire::Header& about, const std::string& why) {
      for (auto& [rank, flow] : job.workers) send_error(*flow, about, {ErrorCode::timeout, why});
    });
  }
  const auto pause = std::clamp<std::chrono::milliseconds>(patience / 9, kShortestPause, std::chrono::seconds(5));
  loop_.call_at(Clock::now() + pause, [this] { check_overdue(); });
}

}  // namespace poseidon
