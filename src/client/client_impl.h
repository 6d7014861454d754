// ClientImpl: a worker's client. It puts together its connections, its steps and its report of a failure.
//
// API threads use Steps, and the loop's thread uses everything that touches flows and syncers. Steps posts each start
// to the loop.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "client/connections.h"
#include "client/departures.h"
#include "client/downlink_priority.h"
#include "client/failure_report.h"
#include "client/heartbeats.h"
#include "client/lobby.h"
#include "client/notices.h"
#include "client/steps.h"
#include "client/unit_announcer.h"
#include "client/unit_state.h"
#include "client/worker_parts.h"
#include "collective/collectives.h"
#include "poseidon/client.h"
#include "transport/transport.h"

namespace poseidon {

class ClientImpl final : public Client, private Receiver {
 public:
  /// `options` has the rank, world size and number of this generation. A server of this process may share the loop. The
  /// loop stops when one of the two is destroyed, after both have shut down. The lobby accepts the peers' connections
  /// on the same loop. `parts` must not be null.
  ClientImpl(const Options& options, const Cluster& cluster, const Seat& seat, std::unique_ptr<WorkerParts> parts,
             std::shared_ptr<Loop> loop, std::unique_ptr<Lobby> lobby);
  ~ClientImpl() override;

  /// Connects to all servers and neighbours (Connections::connect) and waits until all have greeted. Blocks up to the
  /// timeout.
  Status link(Endpoints endpoints, const std::function<bool()>& keep_waiting);
  /// See FailureReport::set_server. Any thread but the loops' may call it. What the function uses must live until
  /// shutdown() has returned.
  void set_server_report(FailureReport::WriteServer write_server) {
    loop_->check_other_thread();
    loop_->call([&] { report_.set_server(std::move(write_server)); });
  }
  /// Ends the client with `status`, because the worker has failed before it could link. Returns `status` with the path
  /// of the flight record.
  Status fail_to_join(const Status& status);

  int rank() const override { return options_.rank; }
  int world_size() const override { return options_.world_size; }
  Cluster cluster() const override { return steps_.cluster(); }
  std::uint32_t generation() const override { return options_.generation; }
  std::string run() const override { return connections_.run(); }
  bool joining() const override { return seat_.joining; }
  bool servers_save() const override {
    return loop_->call([this] { return connections_.servers_save(); });
  }
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
  Status start_rows(std::uint32_t layer, const LayerRows& rows, std::span<std::byte> destination,
                    std::uint32_t divisor) override;
  LayerRows result_rows(std::uint32_t layer) const override;
  Status push_pull(std::uint32_t layer, std::span<const std::byte> data, std::span<std::byte> destination,
                   std::uint32_t divisor) override;
  Status push(std::uint32_t layer, std::span<const std::byte> data, std::uint32_t divisor) override;
  Status pull(std::uint32_t layer, std::span<std::byte> destination, std::uint32_t array, bool exact) override;
  Status assign(std::uint32_t layer, std::span<const std::byte> data, std::uint32_t array,
                std::uint64_t update_count) override;
  Status restore(std::uint32_t layer, std::span<std::byte> destination, std::uint64_t version_limit) override;
  Status set_rule(std::uint32_t layer, const UpdateRule& rule, bool compared) override {
    return steps_.set_rule(layer, rule, compared);
  }
  std::span<const std::byte> residual(std::uint32_t layer) const override;
  Status set_residual(std::uint32_t layer, std::span<const std::byte> residual) override;
  Scheme next_scheme(std::uint32_t layer) const override { return steps_.next_scheme(layer); }
  void set_factor_count(std::uint32_t layer, std::uint64_t factor_count) override;
  Status choose(std::uint32_t layer, const SchemeChoice& choice) override;
  std::vector<GatheredPart> gathered(std::uint32_t layer) const override;
  void act_for(std::uint64_t thread) override { steps_.act_for(thread); }
  void expect_other_threads() override { steps_.expect_other_threads(); }
  Status wait_all(const std::function<bool()>& keep_waiting) override;
  Status wait(std::uint32_t layer, const std::function<bool()>& keep_waiting) override;
  std::uint64_t newest_operation(std::uint32_t layer) const override { return steps_.newest_operation(layer); }
  Status wait_operation(std::uint32_t layer, std::uint64_t number, const std::function<bool()>& keep_waiting) override;
  bool done(std::uint32_t layer) const override { return steps_.done(layer); }
  bool operation_done(std::uint32_t layer, std::uint64_t number) const override {
    return steps_.operation_done(layer, number);
  }
  Status set_priorities(std::uint32_t first_layer, std::span<const LayerPriority> priorities,
                        double priority_threshold) override;
  std::vector<std::string> notices() const override;
  std::uint64_t behind() const override { return steps_.behind(); }
  std::vector<LateRank> straggler_report() const override;
  LayerStats layer_stats(std::uint32_t layer) const override { return steps_.stats(layer); }
  void record_pushes(std::uint64_t first, std::uint32_t count) override { steps_.record(first, count); }
  std::vector<LayerStats> recorded_pushes(std::uint32_t layer) const override { return steps_.recorded(layer); }
  TrafficStats traffic() const override;
  Status add_communicator(std::uint32_t id, std::vector<std::uint32_t> ranks) override;
  Result<std::uint64_t> start_collective(std::uint32_t communicator, CollectiveCall call) override;
  Result<std::uint64_t> send(std::uint32_t communicator, std::uint32_t to, MessageKind kind,
                             std::span<const std::byte> data) override;
  Result<std::uint64_t> receive(std::uint32_t communicator, std::uint32_t from, MessageKind kind,
                                std::span<std::byte> memory) override;
  Result<std::uint32_t> wait_collective(std::uint64_t call, std::chrono::milliseconds limit,
                                        const std::function<bool()>& keep_waiting) override;
  bool collective_done(std::uint64_t call) const override { return steps_.task_done(call); }
  Status status() const override { return steps_.status(); }
  void abort(const std::string& reason, bool planned) override;
  using Client::shutdown;
  void shutdown(const std::function<bool()>& keep_waiting, bool serves_on) override;

 private:
  /// What the client does with the messages that kinds.def gives to a handler: handlers/NAME.cc. An error ends the job.
  struct Handlers {
#define POSEIDON_KIND(name, ...)                                                      \
  static Status name(ClientImpl& client, LinkState& link, const wire::Header& header, \
                     std::span<const std::byte> payload);
#include "wire/kinds.def"  // IWYU pragma: keep
  };

  // Receiver.
  Result<std::span<std::byte>> accept(Flow& flow, const wire::Header& header, bool lent) override;
  void on_progress(Flow& flow, const wire::Header& header, std::size_t received_bytes) override;
  Status on_message(Flow& flow, const wire::Header& header, std::span<const std::byte> payload,
                    std::function<void()> release) override;
  void on_closed(Flow& flow, const Status& status) override;

  // Both sides: how a rank leaves (client_leaving.cc).
  bool still_contributes();
  void finish_contributions(const std::function<bool()>& keep_waiting);
  void end(bool had_failed, const std::function<bool()>& keep_serving);
  void stop_in_order();

  // Loop side: exchanges, messages and failures (client_loop.cc).
  void connect_servers(const Plan& plan);
  void add_units(const std::shared_ptr<const Plan>& plan, bool transient);
  void begin(UnitState& unit, Operation&& operation);
  void run(UnitState& unit, Operation&& operation);
  bool needs_peers(const UnitState& unit, const Operation& operation) const;
  void greeted();
  void finished(UnitState& unit);
  Result<std::span<std::byte>> place_for(LinkState& link, const wire::Header& header, bool lent);
  void note_arrival(LinkState& link, const wire::Header& header);
  Status take(LinkState& link, const wire::Header& header, std::span<const std::byte> payload);
  Status handle(LinkState& link, const wire::Header& header, std::span<const std::byte> payload);
  Status reject(const LinkState& link, const Status& status);
  Addressee* addressee(const LinkState& link, const wire::Header& header);
  bool belongs(const LinkState& link, const Chunk& chunk) const;
  void fail(const Status& status, const FailureCause& cause);
  void fail_if(const Departure* departure);
  void fail_silent(std::chrono::milliseconds patience);
  void stop(const Status& status, const wire::Header& last_message, const std::shared_ptr<const std::string>& text,
            const std::function<void()>& when_told);

  // Collectives (client_collectives.cc).
  /// Begins a call of a collective, on the loop.
  using BeginCall = std::function<Status(std::uint64_t task)>;
  Result<std::uint64_t> submit_call(BeginCall begin);
  void begin_call(std::uint64_t task, const BeginCall& begin);
  /// A communicator, as the API threads know it. Size 0: there is none.
  struct CommunicatorPlace {
    std::uint32_t rank = 0;
    std::uint32_t size = 0;
  };
  CommunicatorPlace place_in(std::uint32_t communicator) const;

  // API side (client.cc).
  /// A wait by an API thread.
  struct Wait {
    const std::function<bool()>& keep_waiting;
    std::int64_t begun_ns = now_ns();
    bool gave_up = false;
  };
  void look(Wait& wait);
  Status wait_linked(const std::function<bool()>& keep_waiting);
  Status check_plans(const Plan& plan, const std::function<bool()>& keep_waiting);

  const std::unique_ptr<WorkerParts> parts_;  // must outlive all other members
  const Options options_;
  const Seat seat_;
  mutable Notices notices_;  // those of the parts come when somebody asks
  const std::shared_ptr<Loop> loop_;
  std::unique_ptr<Executor> executor_;  // its threads post to the loop

  // Only the loop's thread uses these.
  Connections connections_;
  Steps steps_;  // any thread uses it
  std::map<std::uint32_t, UnitState*> units_by_id_;
  std::vector<std::pair<UnitState*, Operation>> waiting_for_peers_;  // contributions that cannot be sent yet
  std::vector<std::pair<std::uint64_t, BeginCall>> calls_waiting_for_peers_;
  Collectives collectives_;
  FailureReport report_;
  Departures departures_;
  Heartbeats heartbeats_;
  DownlinkPriority downlink_priority_;
  UnitAnnouncer announcer_;
  bool leaving_ = false;  // nothing starts here any more
  bool closing_ = false;

  mutable std::mutex communicators_mutex_;
  std::map<std::uint32_t, CommunicatorPlace> communicators_;  // by id; under the mutex

  bool shut_down_ = false;             // only the owner's thread uses it
  std::vector<std::uint64_t> linked_;  // what the exchange moves that ends when all ranks have linked
};

}  // namespace poseidon
