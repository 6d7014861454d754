// The interface between a server core and a baseline that gives chunks to other cores than the one that receives them
// (src/server/baselines/worker_assignment.h). A core without a ChunkHandover owns every chunk that it receives.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "poseidon/status.h"
#include "server/chunk/requester.h"
#include "server/core/shard.h"
#include "server/core/tenants.h"
#include "transport/loop.h"
#include "wire/header.h"
#include "wire/messages/hello.h"

namespace poseidon {

/// What a handover asks of its core. All calls but `loop` are made on the core's loop.
///
/// A guest is a worker that is connected to another core and pushes to chunks that this core owns.
class HandoverCore {
 public:
  virtual ~HandoverCore() = default;
  /// Any thread may call it.
  virtual Loop& loop() = 0;
  /// Returns the job's chunks on this core, or null if the job is not known here.
  virtual Shard* shard_of(const JobName& job) = 0;
  /// Adds a guest to the run and generation of its hello, and creates them here if needed. Returns false if the job has
  /// gone on to others meanwhile.
  virtual bool add_guest(const JobName& job, const wire::Hello& hello) = 0;
  /// Removes a guest that has left. The job may end with it.
  virtual void remove_guest(const JobName& job) = 0;
  /// Returns a connection of this core, or null if it has closed.
  virtual Requester* connection(std::uint64_t id) = 0;
};

/// One core's side of the handover. All calls are made on the core's loop.
class ChunkHandover {
 public:
  virtual ~ChunkHandover() = default;
  /// Whether another core owns the chunk of this contribution.
  virtual bool is_elsewhere(const wire::Envelope& contribution) const = 0;
  /// Takes a contribution to such a chunk from a connection. `payload` is lent until `release`, which may be called on
  /// another core's loop. It is empty if there is no payload.
  virtual void hand_over(const JobName& job, std::uint64_t connection_id, const wire::Header& contribution,
                         std::span<const std::byte> payload, std::function<void()> release) = 0;
  /// Notes that a connection of the job has said hello (`joined`) or has closed.
  virtual void joined(const JobName& job, std::uint64_t connection_id, const wire::Hello& hello) = 0;
  virtual void closed(const JobName& job, std::uint64_t connection_id) = 0;

  /// Tells all guests of the job that a request does not fit.
  virtual void refuse_guests(const JobName& job, const wire::Envelope& about, const Status& status) = 0;
  /// Makes the job's guests leave `shard`, because the job's run or generation has ended.
  virtual void drop_guests(const JobName& job, Shard& shard) = 0;
};

}  // namespace poseidon
