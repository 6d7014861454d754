// ServerCore: one loop of a server, with its listeners, its workers' flows and its chunks.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/flight_recorder.h"
#include "base/insertion_map.h"
#include "base/pinned.h"
#include "base/thread.h"
#include "poseidon/options.h"
#include "server/core/chunk_handover.h"
#include "server/core/core_job_report.h"
#include "server/core/job_failure.h"
#include "server/core/pending_connections.h"
#include "server/core/port_watch.h"
#include "server/core/shard.h"
#include "server/core/tenants.h"
#include "transport/transport.h"
#include "wire/messages/hello.h"

namespace poseidon {

/// A core receives, reduces, updates and sends back on its own loop. No core waits for another (Parameter Hub §3.2.4).
class ServerCore final : public HandoverCore, private Receiver, private Pinned {
 public:
  /// `wide` and `checkpoints` must outlive the core.
  struct Surroundings {
    std::size_t index = 0;
    std::shared_ptr<Tenants> tenants;         // the server's tenants, shared by its cores
    std::size_t core_count = 1;               // the number of the server's cores
    ThreadedSum* wide = nullptr;              // null: sums are made on the core's loop
    CheckpointWriter* checkpoints = nullptr;  // null: nothing is saved
    /// Called on the core's loop when a job has lost a worker or has waited for too long. May be empty.
    std::function<void(const JobFailure&)> on_failure;
    /// Called on the core's loop, once for each rank of a job that is often late. May be empty.
    std::function<void(const JobName& job, std::uint32_t rank, const std::string& text)> on_late_rank;
  };
  ServerCore(const Options& options, std::shared_ptr<Loop> loop, Surroundings surroundings);
  ~ServerCore() override;

  /// Sets the addresses of the server's other cores. The core tells them to its workers. Call it before `listen`.
  void set_other_cores(std::vector<std::string> addresses);
  /// Accepts workers at another address. Returns the address to publish. The transport must outlive the core.
  Result<std::string> listen(Transport& transport, const std::string& address);

  /// Closes everything. Messages that are queued for the workers have up to `linger` to leave, for as long as some of
  /// them do. `begin_shutdown` returns at once, so that all cores of a server end together; `finish_shutdown` waits.
  /// Only the first call counts.
  void begin_shutdown(std::chrono::milliseconds linger);
  void finish_shutdown(std::chrono::milliseconds linger);

  /// Whether a worker that has not left may ask for a value that is kept here. Any thread but the loop's may call it.
  bool has_values_for_others();

  /// Adds one value to a flight record: what the loop did last, its connections, and what its chunks wait for. Any
  /// thread but the loop's may call it. It waits for the loop.
  void report(JsonWriter& json, std::int64_t time_ns);

  /// Returns the loop, for an owner that has to stop all loops before it destroys the first core.
  Loop& loop() override { return *loop_; }

  /// Sets the baseline that gives chunks to the cores that own them. Call it before `listen`.
  void set_handover(std::unique_ptr<ChunkHandover> handover);

  /// Returns the network bytes of all flows so far. Any thread but the loop's may call it.
  TrafficStats traffic();
  /// Returns the ranks without which steps of the jobs' chunks here have ended. Any thread but the loop's may call it.
  std::vector<LateRank> late_ranks();
  /// Returns what this core knows of each job. Any thread but the loop's may call it.
  std::vector<CoreJobReport> jobs();
  /// Ends a job here, if it is this run or goes on as one of its later generations: its workers are told `why`. Any
  /// thread but the loop's may call it.
  void evict(const JobName& job, const JobRun& run, const Status& why);

 private:
  static constexpr auto kLinger = std::chrono::seconds(2);  // how long a flow that is closed may still send
  class Connection;
  struct Job;
  /// What the server does with the messages that kinds.def gives to a handler: handlers/NAME.cc. An error refuses a
  /// request, and otherwise ends the connection. `payload` need not outlive the call.
  struct Handlers {
#define POSEIDON_KIND(name, ...)                                                     \
  static Status name(ServerCore& core, Connection& from, const wire::Header& header, \
                     std::span<const std::byte> payload);
#include "wire/kinds.def"  // IWYU pragma: keep
  };

  bool begin_turn(Flow& flow) override;
  void end_turn(Flow& flow) override;
  bool may_receive(Flow& flow, const wire::Header& header) override;
  Result<std::span<std::byte>> accept(Flow& flow, const wire::Header& header, bool lent) override;
  void on_progress(Flow& flow, const wire::Header& header, std::size_t received_bytes) override;
  Status on_message(Flow& flow, const wire::Header& header, std::span<const std::byte> payload,
                    std::function<void()> release) override;
  void on_closed(Flow& flow, const Status& status) override;

  Result<std::span<std::byte>> place_for(Flow& flow, const wire::Header& header, bool lent);
  Status take(Flow& flow, const wire::Header& header, std::span<const std::byte> payload,
              std::function<void()> release);
  std::uint64_t bytes_delivered();
  void connected(std::shared_ptr<Flow> flow);
  static bool speaks_for_host(const Connection& connection, const wire::Header& header);
  static Status check_place(Connection& connection, const wire::Header& header);
  Status objection(const JobName& name, const wire::Hello& hello) const;
  std::string pace_objection(const Job* job, const wire::Hello& hello) const;
  Result<Job*> job_of(const JobName& name, const wire::Hello& hello);
  static Status replaced_by(const wire::Hello& next, const Job& job);
  void end_generation(std::unique_ptr<Job> job, const Status& why);
  /// A dedicated server outlives the runs of a job. An embedded server belongs to one run.
  bool embedded() const { return options_.world_size > 0; }
  void end_if_empty(Job& job);
  Status contribute(Connection& connection, const wire::Header& header, std::span<const std::byte> payload,
                    std::function<void()> release);
  Status handle(Connection& connection, const wire::Header& header, std::span<const std::byte> payload);
  void answer(Connection& connection, const wire::Header& header, std::span<const std::byte> payload);
  Result<Shard*> values_of(Connection& connection, const wire::Envelope& request) const;
  void check_overdue();
  void resume_waiting(Job& job);
  bool waits_for_others(const Connection& connection, const wire::Header& header) const;

  // Defined in server_rate.cc:
  void resume_at(std::int64_t time_ns);

  // Defined in server_jobs.cc:
  static CoreJobReport report_of(const Job& job);

  // Defined in server_report.cc:
  static void heard(Connection& connection, const wire::Header& header);
  void note(FlightEvent::Kind kind, const Connection& connection, const char* what,
            const wire::Envelope* about = nullptr);
  static std::vector<std::uint32_t> silent_ranks(const Job& job, const OpenChunk& chunk, std::int64_t since_ns);
  void remember_open_chunks(Job& job);
  void tell_lost(const Connection& connection, const Status& status);
  void tell_failure(const Job& job, FailureSource source, std::uint32_t rank, const Status& status) const;
  void tell_overdue(Job& job, const OpenChunk& chunk, const std::vector<std::uint32_t>& silent);
  void note_departure(Job& job, std::uint32_t rank);
  static void refuse_if_departed(Connection& from, const wire::Envelope& contribution);
  static void refuse_for_departed(Connection& to, const wire::Envelope& about, std::uint32_t rank);

  // The interface of chunk_handover.h:
  Shard* shard_of(const JobName& job) override;
  bool add_guest(const JobName& job, const wire::Hello& hello) override;
  void remove_guest(const JobName& job) override;
  Requester* connection(std::uint64_t id) override;
  bool is_elsewhere(const wire::Envelope& contribution) const {
    return handover_ != nullptr && handover_->is_elsewhere(contribution);
  }
  std::function<void()> lend_received(Connection& connection);

  const Options options_;
  const Surroundings surroundings_;
  // It outlives the connections. It is shared, because the first owner to end stops it, after all have shut down.
  const std::shared_ptr<Loop> loop_;
  std::vector<std::unique_ptr<Listener>> listeners_;  // only the owner's thread uses it
  std::unique_ptr<ChunkHandover> handover_;           // null: this core owns every chunk that it receives
  std::map<JobName, std::unique_ptr<Job>> jobs_;
  std::vector<std::unique_ptr<Job>> replaced_jobs_;  // jobs of earlier generations, whose connections are being closed
  InsertionMap<const Flow, std::unique_ptr<Connection>> connections_;
  PendingConnections pending_;
  PortWatch port_watch_;
  bool resumption_planned_ = false;
  bool sharing_ = false;  // the current turn is counted, because there are several jobs
  std::uint64_t next_connection_id_ = 1;
  std::vector<std::string> other_cores_;
  FlightRecorder recorder_;
  std::vector<OpenChunk> remembered_;  // the open chunks of the job that failed last, as they were then
  TrafficStats closed_traffic_;        // of flows that no longer exist
  bool shut_down_ = false;             // only the owner's thread uses it,
  bool finished_ = false;              // and this
  bool stopping_ = false;              // only the loop uses it
  Completion all_closed_ = Completion::make();
};

}  // namespace poseidon
