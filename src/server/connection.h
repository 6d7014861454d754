// Connection: one flow of a worker to a server core; and the jobs that they belong to.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "server/requester.h"
#include "server/server_core.h"
#include "wire/messages.h"

namespace poseidon {

/// Loop thread of its core only.
class ServerCore::Connection final : public Requester {
 public:
  Connection(std::uint64_t id, std::shared_ptr<Flow> flow) : id_(id), flow_(std::move(flow)) {}

  void send(const wire::Header& header, std::shared_ptr<const Buffer> payload) override {
    std::vector<std::span<const std::byte>> pieces;
    if (payload) pieces.push_back(payload->span());
    flow_->send(header, std::move(pieces), [payload](const Status&) {});
  }
  void refuse(const wire::Header& about, const Status& status) override {
    const wire::TextMessage message = wire::make_error(wire::Kind::refuse, about, status);
    flow_->send(message.header, {message.payload()}, [text = message.text](const Status&) {});
  }

  std::uint64_t id() const { return id_; }
  Flow& flow() { return *flow_; }

  Job* job = nullptr;  // null until its hello
  std::uint32_t rank = 0;
  std::uint32_t flow_index = 0;
  std::uint32_t priority_class = 0;
  Buffer receiving;       // a text, a contribution that others own or one that is refused: where it lands
  Status refusal;         // of the contribution that is being received
  bool in_shard = false;  // the contribution that is being received lands in this core's shard

 private:
  const std::uint64_t id_;
  const std::shared_ptr<Flow> flow_;
};

/// Assignment::worker: a worker that is connected to another core of the server, as this one sees it.
class ServerCore::RemoteWorker final : public Requester {
 public:
  RemoteWorker(ServerCore& home, std::uint64_t connection_id, Loop& here)
      : home_(home), connection_id_(connection_id), here_(here) {}

  void send(const wire::Header& header, std::shared_ptr<const Buffer> payload) override {
    // The payload's memory belongs to this loop's pool: its last owner has to let go here.
    std::shared_ptr<const Buffer> lent;
    if (payload)
      lent = {payload.get(), [&here = here_, held = payload](const Buffer*) mutable {
                here.post([moved = std::move(held)] {});  // a copy could make this thread the last owner
              }};
    payload.reset();
    home_.loop().post([&home = home_, id = connection_id_, header, lent] {
      home.with_connection(id, [&](Connection& connection) { connection.send(header, lent); });
    });
  }
  void refuse(const wire::Header& about, const Status& status) override {
    home_.loop().post([&home = home_, id = connection_id_, about, status] {
      home.with_connection(id, [&](Connection& connection) { connection.refuse(about, status); });
    });
  }

 private:
  ServerCore& home_;
  const std::uint64_t connection_id_;
  Loop& here_;
};

/// One job's chunks and workers: from its first hello until its last connection has gone.
struct ServerCore::Job {
  Job(std::string job_name, std::uint32_t count, Reduction reduction, WideThreads wide)
      : name(std::move(job_name)), worker_count(count), shard(count, reduction, wide) {}
  const std::string name;
  const std::uint32_t worker_count;
  std::set<Connection*> connections;
  std::map<std::uint64_t, std::unique_ptr<RemoteWorker>> remote;  // Assignment::worker: of other cores, by id
  Shard shard;
};

}  // namespace poseidon
