// ClientImpl: the worker's loop, its flows and its syncers.
//
// Two sides: API threads talk to the tables under `mutex_`; everything that touches flows and
// syncers happens on the loop. `start*` crosses over by posting.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/flight_record.h"
#include "base/flight_recorder.h"
#include "client/connections.h"
#include "client/flight_report.h"
#include "client/lateness.h"
#include "client/lobby.h"
#include "client/syncer.h"
#include "client/unit_state.h"
#include "client/worker_parts.h"
#include "poseidon/client.h"
#include "transport/transport.h"
#include "wire/messages.h"

namespace poseidon {

/// What this process is among the members of its generation, besides its rank.
struct Seat {
  int slot = 0;          // the rank that it was started with
  bool joining = false;  // as Client::joining
};

class ClientImpl final : public Client, private Receiver {
 public:
  /// `options` has the rank, world size and number of this generation. The loop may be shared with a server of this
  /// process; it is stopped when either is destroyed, after both have shut down. Peers come through the lobby, which is
  /// on that loop. `parts` is not null.
  ClientImpl(const Options& options, const Cluster& cluster, const Seat& seat, std::unique_ptr<WorkerParts> parts,
             std::shared_ptr<Loop> loop, std::unique_ptr<Lobby> lobby);
  ~ClientImpl() override;

  /// Connects to all servers and peers and waits until all have greeted. Blocks up to the timeout.
  Status link(const Endpoints& endpoints, const std::function<bool()>& keep_waiting);
  /// Adds what the embedded server knows to a flight record, as one value with times relative to `time_ns`. Any thread
  /// but the loops'; until shutdown() has returned.
  void set_server_report(std::function<void(JsonWriter&, std::int64_t time_ns)> report) {
    loop_->call([&] { server_report_ = std::move(report); });
  }
  /// The worker has failed before this could be linked: ends it with `status`, which comes back with the record's path.
  Status fail_to_join(const Status& status);

  int rank() const override { return options_.rank; }
  int world_size() const override { return options_.world_size; }
  std::uint32_t generation() const override { return options_.generation; }
  bool joining() const override { return seat_.joining; }
  Result<Added> add_layers(std::vector<Layer> layers, bool transient,
                           const std::function<bool()>& keep_waiting) override;
  Result<std::size_t> choose_chunk_bytes(std::size_t known, const std::function<bool()>& keep_waiting) override;
  Status start(std::uint32_t layer, std::span<std::byte> data, std::uint32_t divisor,
               std::uint64_t factor_count) override;
  Status start_all(std::uint32_t first_layer, std::span<const std::span<std::byte>> arrays,
                   std::uint32_t divisor) override;
  Status start_absent(std::uint32_t layer, std::span<std::byte> destination, std::uint32_t divisor,
                      bool counts) override;
  Status start_factors(std::uint32_t layer, DType dtype, std::vector<FactorRows> segments,
                       std::span<std::byte> destination, std::uint32_t divisor, bool accumulate) override;
  Status push_pull(std::uint32_t layer, std::span<const std::byte> data, std::span<std::byte> destination,
                   std::uint32_t divisor) override;
  Status push(std::uint32_t layer, std::span<const std::byte> data, std::uint32_t divisor) override;
  Status pull(std::uint32_t layer, std::span<std::byte> destination, std::uint32_t array) override;
  Status assign(std::uint32_t layer, std::span<const std::byte> data, std::uint32_t array,
                std::uint64_t update_count) override;
  Status restore(std::uint32_t layer, std::span<std::byte> destination, std::uint64_t version_limit) override;
  Status set_rule(std::uint32_t layer, const UpdateRule& rule) override;
  Scheme next_scheme(std::uint32_t layer) const override;
  void set_factor_count(std::uint32_t layer, std::uint64_t factor_count) override;
  std::vector<GatheredPart> gathered(std::uint32_t layer) const override;
  Status wait_all(const std::function<bool()>& keep_waiting) override;
  Status wait(std::uint32_t layer, const std::function<bool()>& keep_waiting) override;
  bool done(std::uint32_t layer) const override;
  Status set_priorities(std::uint32_t first_layer, std::span<const LayerPriority> priorities,
                        double priority_threshold) override;
  std::vector<std::string> notices() const override;
  std::uint64_t behind() const override;
  std::vector<LateRank> straggler_report() const override;
  LayerStats layer_stats(std::uint32_t layer) const override;
  TrafficStats traffic() const override;
  Status status() const override;
  void abort(const std::string& reason, bool planned) override;
  void shutdown() override;

 private:
  // Receiver.
  Result<std::span<std::byte>> accept(Flow& flow, const wire::Header& header, bool lent) override;
  void on_progress(Flow& flow, const wire::Header& header, std::size_t received_bytes) override;
  Status on_message(Flow& flow, const wire::Header& header, std::span<const std::byte> payload,
                    std::function<void()> release) override;
  void on_closed(Flow& flow, const Status& status) override;

  // Loop side: exchanges, messages and failures (client_loop.cc).
  void stop(const Status& status, const wire::Header& last_message, const std::shared_ptr<const std::string>& text,
            const std::function<void()>& when_told);
  void register_units(const std::shared_ptr<const Plan>& plan, bool transient);
  void describe_units(const Plan& plan);  // client_units.cc
  void begin(UnitState& unit, Operation operation);
  void finished(UnitState& unit);
  void release_layers(UnitState& unit);
  void release_layers_locked(UnitState& unit);
  Status take(LinkState& link, const wire::Header& header, std::span<const std::byte> payload, bool lent);
  Status greeted(LinkState& link, const wire::Hello& hello);
  Status check_place(const LinkState& link, const wire::Header& header) const;
  Status deliver(const wire::Header& header, std::span<const std::byte> payload, bool lent);
  Status reject(const LinkState& link, const Status& status);
  void aborted(const LinkState& link, const wire::Abort& abort);
  void refused(const LinkState& link, const wire::Header& header, const wire::Refuse& refuse);
  bool has_place(const LinkState& link, const wire::Header& header) const;
  bool needs(const LinkState& link) const;
  bool belongs(const LinkState& link, const Chunk& chunk) const;

  // Loop side: messages and records (client_report.cc).
  void add_notice(const std::string& notice);
  void fail(const Status& status, const FailureCause& cause);
  FlightReport make_report(const Status& status, const FailureCause& cause, std::int64_t time_of_day_ns) const;
  bool linked() const;
  std::string describe_waiting() const;

  // API side (client.cc).
  Status submit(std::uint32_t layer, Operation operation);
  Status submit_locked(std::uint32_t layer, Operation operation, std::int64_t time_ns);
  bool join_group_locked(LayerState& layer, Push& push);
  Status check_start(std::uint32_t layer, const Operation& operation) const;
  Status wait_until(const std::function<bool()>& done, const std::function<bool()>& keep_waiting);
  void set_chunk_bytes(std::size_t chunk_bytes);
  Status check_plans(const Plan& plan, const std::function<bool()>& keep_waiting);
  /// Whether something other than shutdown() has ended the job.
  bool failed() const;

  const std::unique_ptr<WorkerParts> parts_;  // outlives all else here
  const Options options_;
  Cluster cluster_;  // its core counts are known when linked
  const Seat seat_;
  std::function<void(JsonWriter&, std::int64_t)> server_report_;
  std::string record_directory_;      // empty: no flight records
  FlightRecordWriter record_writer_;  // after what its thread uses has been made, before it goes

  const std::shared_ptr<Loop> loop_;
  std::unique_ptr<Executor> executor_;  // its threads post to the loop

  // Loop thread only.
  Connections connections_;
  std::map<std::uint32_t, UnitState*> units_by_id_;
  std::map<std::string, std::size_t> stored_names_;  // how many stored units have been called so
  std::uint64_t restored_version_ = 0;               // of the servers' checkpoints
  const std::chrono::system_clock::time_point began_ = std::chrono::system_clock::now();
  bool closing_ = false;
  Status left_;  // a peer or server has said goodbye: nothing can start any more
  FailureCause left_by_;

  // Under mutex_.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<UnitState> units_;
  std::vector<std::vector<LayerState>> layer_blocks_;  // one per add_layers
  std::vector<LayerState*> layers_;
  std::size_t chunk_bytes_;  // of layers that are added from here on
  std::size_t running_count_ = 0;
  std::size_t single_waiter_count_ = 0;  // threads that wait for one layer
  bool linked_ = false;
  bool all_closed_ = false;
  Status status_;  // the first failure; everything after it fails alike
  std::vector<std::string> notices_;
  std::map<const Plan*, Lateness> lateness_;  // by what was added together
  std::uint32_t next_unit_id_ = 0;

  bool shut_down_ = false;  // the owner's thread
};

}  // namespace poseidon
