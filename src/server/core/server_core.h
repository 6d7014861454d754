// ServerCore: one loop of a server, with its listeners, its workers' flows and its chunks.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/flight_recorder.h"
#include "poseidon/options.h"
#include "server/core/chunk_handover.h"
#include "server/core/job_failure.h"
#include "server/core/shard.h"
#include "server/core/tenants.h"
#include "transport/transport.h"
#include "wire/messages.h"

namespace poseidon {

/// Receive, reduce, update and send back: all of it happens on this core's loop, and no core waits for
/// another (Parameter Hub §3.2.4).
class ServerCore final : public HandoverCore, private Receiver {
 public:
  /// `wide` and `checkpoints` outlive this.
  struct Surroundings {
    std::size_t index = 0;
    std::shared_ptr<Tenants> tenants;         // of the server
    std::size_t core_count = 1;               // of the server
    ThreadedSum* wide = nullptr;              // null: sums are made on the core's loop
    CheckpointWriter* checkpoints = nullptr;  // null: nothing is saved
    /// Told on the core's loop when a job has lost a worker or waits for too long; may be empty.
    std::function<void(const JobFailure&)> on_failure;
    /// Told on the core's loop, once for each rank of a job: that it is often late. May be empty.
    std::function<void(const JobName& job, std::uint32_t rank, const std::string& text)> on_late_rank;
  };
  ServerCore(const Options& options, std::shared_ptr<Loop> loop, Surroundings surroundings);
  ~ServerCore() override;
  ServerCore(const ServerCore&) = delete;
  ServerCore& operator=(const ServerCore&) = delete;

  /// Where the server's other cores listen: told to workers that find this one. Before `listen`.
  void set_other_cores(std::vector<std::string> addresses);
  /// Accepts workers there too; returns the address to publish. The transport must outlive this.
  Result<std::string> listen(Transport& transport, const std::string& address);

  /// Closes everything. Gives what is queued for the workers up to `linger` to leave, as long as some of it does.
  /// `begin` returns at once, so that all cores of a server end together; then `finish` waits. Once only counts.
  void begin_shutdown(std::chrono::milliseconds linger);
  void finish_shutdown(std::chrono::milliseconds linger);

  /// Adds to a flight record, as one value, what the loop did last, its connections and what its chunks wait for.
  /// Any thread but the loop's; waits for it.
  void report(JsonWriter& json, std::int64_t time_ns);

  /// The loop; for an owner that has to stop all loops before the first core goes.
  Loop& loop() override { return *loop_; }

  /// Chunks that others own are handed to them: the baseline. Before `listen`.
  void set_handover(std::unique_ptr<ChunkHandover> handover);

  /// Network bytes of all flows so far: sent, received. Any thread but the loop's.
  std::pair<std::uint64_t, std::uint64_t> traffic();
  /// The ranks that steps of the jobs' chunks here have been ended without. Any thread but the loop's.
  std::vector<LateRank> late_ranks();

 private:
  static constexpr auto kLinger = std::chrono::seconds(2);  // of a flow that is closed while it still has to send
  class Connection;
  struct Job;

  bool begin_turn(Flow& flow) override;
  void end_turn(Flow& flow) override;
  bool may_receive(Flow& flow, const wire::Header& header) override;
  Result<std::span<std::byte>> on_header(Flow& flow, const wire::Header& header) override;
  void on_progress(Flow& flow, const wire::Header& header, std::size_t received_bytes) override;
  Status on_message(Flow& flow, const wire::Header& header, std::span<const std::byte> payload,
                    std::function<void()> release) override;
  void on_closed(Flow& flow, const Status& status) override;

  Result<std::span<std::byte>> place_for(Flow& flow, const wire::Header& header);
  Status take(Flow& flow, const wire::Header& header, std::span<const std::byte> payload,
              std::function<void()> release);
  std::uint64_t bytes_delivered();
  void accept(std::shared_ptr<Flow> flow);
  void watch_pending();
  void dismiss_oldest_pending();
  Status check_place(Connection& connection, const wire::Header& header) const;
  Status greet(Connection& connection, const wire::Header& header, std::span<const std::byte> payload);
  std::string objection(const JobName& name, const wire::Hello& hello) const;
  std::string pace_objection(const Job* job, const wire::Hello& hello) const;
  Result<Job*> job_of(const JobName& name, const wire::Hello& hello);
  void end_generation(std::unique_ptr<Job> job, const wire::Hello& next);
  /// A server of its own outlives the runs of a job; an embedded one is of one run.
  bool embedded() const { return options_.world_size > 0; }
  void end_if_empty(Job& job);
  Status contribute(Connection& connection, const wire::Header& header, std::span<const std::byte> payload,
                    std::function<void()> release);
  Status request(Connection& connection, const wire::Header& header, std::span<const std::byte> payload);
  void check_overdue();
  static void resume_waiting(Job& job);

  // server_report.cc
  static void heard(Connection& connection);
  void note(FlightEvent::Kind kind, const Connection& connection, const char* what,
            const wire::Header* about = nullptr);
  static std::vector<std::uint32_t> silent_ranks(const Job& job, const OpenChunk& chunk, std::int64_t since_ns);
  void remember_open_chunks(Job& job);
  void tell_lost(const Connection& connection, const Status& status);
  void tell_failure(const Job& job, FailureSource source, std::uint32_t rank, const Status& status) const;
  void tell_overdue(Job& job, const OpenChunk& chunk, const std::vector<std::uint32_t>& silent);
  void note_departure(Job& job, std::uint32_t rank);
  static void refuse_for_departed(Connection& to, wire::Header about, std::uint32_t rank);

  // For chunk_handover.h.
  Shard* shard_of(const JobName& job) override;
  bool add_guest(const JobName& job, const wire::Hello& hello) override;
  void remove_guest(const JobName& job) override;
  Requester* connection(std::uint64_t id) override;
  bool is_elsewhere(const wire::Header& contribution) const {
    return handover_ != nullptr && handover_->is_elsewhere(contribution);
  }
  std::function<void()> lend_received(Connection& connection);

  const Options options_;
  const Surroundings surroundings_;
  std::vector<std::unique_ptr<Listener>> listeners_;  // the owner's thread
  std::unique_ptr<ChunkHandover> handover_;           // null: every chunk that comes here is this core's
  std::map<JobName, std::unique_ptr<Job>> jobs_;
  std::vector<std::unique_ptr<Job>> replaced_jobs_;  // by a later generation; their connections are being closed
  std::map<const Flow*, std::unique_ptr<Connection>> connections_;
  std::map<std::uint64_t, Connection*> pending_;  // that have not said hello; by id, so the oldest first
  bool pending_watched_ = false;
  bool sharing_ = false;  // the turn under way is counted: there are several jobs
  std::uint64_t next_connection_id_ = 1;
  std::vector<std::string> other_cores_;
  FlightRecorder recorder_;
  std::vector<OpenChunk> remembered_;    // of the job that failed last, as it did
  std::uint64_t closed_bytes_sent_ = 0;  // of flows that are gone
  std::uint64_t closed_bytes_received_ = 0;
  bool shut_down_ = false;  // the owner's thread
  bool stopping_ = false;   // the loop's
  std::promise<void> all_closed_;
  std::future<void> closed_ = all_closed_.get_future();
  const std::shared_ptr<Loop> loop_;  // shared: stopped by whichever owner goes first, after all have shut down
};

}  // namespace poseidon
