// ClientImpl: the worker's loop, its flows and its syncers.
//
// Two sides: API threads talk to the tables under `mutex_`; everything that touches flows and
// syncers happens on the loop. `start*` crosses over by posting.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "client/group_buffer.h"
#include "client/syncer.h"
#include "poseidon/client.h"
#include "transport/transport.h"

namespace poseidon {

/// Where a client connects to: one address per shard, which transport leads there, and the peers'.
struct Endpoints {
  struct ServerEndpoint {
    Transport* transport = nullptr;
    std::string address;
    bool local = false;  // a shard of this process
  };
  std::vector<ServerEndpoint> servers;
  std::vector<std::string> peers;  // by rank
};

class ClientImpl final : public Client, private Receiver {
 public:
  /// `network` carries peers' factors; it must outlive this.
  ClientImpl(const Options& options, const Cluster& cluster, Transport& network);
  ~ClientImpl() override;

  /// Starts accepting peers; returns the address to publish.
  Result<std::string> listen(const std::string& host);
  /// Connects to all servers and peers and waits until all have greeted. Blocks up to the timeout.
  Status link(const Endpoints& endpoints, const std::function<bool()>& keep_waiting);
  /// Network bytes of the embedded shard, added to this client's own in traffic().
  void set_server_traffic(std::function<std::pair<std::uint64_t, std::uint64_t>()> traffic) {
    server_traffic_ = std::move(traffic);
  }

  int rank() const override { return options_.rank; }
  int world_size() const override { return options_.world_size; }
  Result<Added> add_layers(std::vector<Layer> layers, bool transient,
                           const std::function<bool()>& keep_waiting) override;
  Status start(std::uint32_t layer, std::span<std::byte> data, std::uint32_t divisor,
               std::uint64_t factor_count) override;
  Status start_absent(std::uint32_t layer, std::span<std::byte> destination, std::uint32_t divisor) override;
  Status start_factors(std::uint32_t layer, DType dtype, std::vector<FactorRows> segments,
                       std::span<std::byte> destination, std::uint32_t divisor, bool accumulate) override;
  Scheme next_scheme(std::uint32_t layer) const override;
  void set_factor_count(std::uint32_t layer, std::uint64_t factor_count) override;
  std::vector<GatheredPart> gathered(std::uint32_t layer) const override;
  Status wait_all(const std::function<bool()>& keep_waiting) override;
  Status wait(std::uint32_t layer, const std::function<bool()>& keep_waiting) override;
  LayerStats layer_stats(std::uint32_t layer) const override;
  TrafficStats traffic() const override;
  void abort(const std::string& reason) override;
  void shutdown() override;
  /// Whether something other than shutdown() ended the exchange.
  bool failed() const;

 private:
  struct LayerState;
  /// One unit with what the API threads and the loop share of it.
  struct UnitState {
    UnitState(std::shared_ptr<const Plan> plan, std::size_t index, bool transient, const Links& links,
              std::function<void(UnitState&)> on_done);
    std::shared_ptr<const Plan> plan;    // keeps the syncer's unit alive
    Syncer syncer;                       // loop
    std::unique_ptr<GroupBuffer> group;  // under mutex_ until the group starts; null for one layer
    Scheme next_scheme;                  // under mutex_: the syncer's, for API threads
    std::vector<LayerState*> layers;     // by member
  };
  struct LayerState {
    UnitState* unit = nullptr;
    std::size_t member = 0;  // index in the unit
    Layer layer;
    bool running = false;              // under mutex_
    std::span<std::byte> destination;  // set before the start is posted
    LayerStats stats;                  // under mutex_
  };
  enum class LinkKind : std::uint8_t { server, peer };
  struct LinkState {
    std::shared_ptr<Flow> flow;
    LinkKind kind = LinkKind::peer;
    std::size_t index = 0;  // shard or rank
    bool greeted = false;
    bool left = false;  // said goodbye
    Buffer text;        // of hello, refuse and abort
  };

  // Receiver.
  Result<std::span<std::byte>> on_header(Flow& flow, const wire::Header& header) override;
  Status on_message(Flow& flow, const wire::Header& header, std::span<const std::byte> payload,
                    std::function<void()> release) override;
  void on_closed(Flow& flow, const Status& status) override;

  // Loop side (client_loop.cc).
  void adopt(std::shared_ptr<Flow> flow, LinkKind kind, std::size_t index, bool greet);
  Status on_hello(Flow& flow, LinkState& link, const wire::Header& header, std::span<const std::byte> payload);
  void send_hello(Flow& flow);
  void fail(const Status& status);
  void stop(const Status& status, const wire::Header& last_message, const std::shared_ptr<const std::string>& text);
  void register_units(const std::shared_ptr<const Plan>& plan, bool transient);
  void begin(UnitState& unit, Start start);
  void finished(UnitState& unit);
  void release_layers(UnitState& unit);
  Status reject(const LinkState& link, const Status& status);
  bool has_place(const LinkState& link, const wire::Header& header) const;
  bool needs(const LinkState& link) const;
  std::string describe(const LinkState& link) const;
  std::string not_linked() const;
  std::string describe_waiting() const;

  // API side (client.cc).
  Status submit(std::uint32_t layer, Start start);
  Status check_start(std::uint32_t layer, const Start& start) const;
  Status wait_until(const std::function<bool()>& done, const std::function<bool()>& keep_waiting);
  Status check_plans(const Plan& plan, const std::function<bool()>& keep_waiting);

  const Options options_;
  const Cluster cluster_;
  Transport& network_;
  std::unique_ptr<Listener> listener_;
  std::function<std::pair<std::uint64_t, std::uint64_t>()> server_traffic_;
  std::atomic<std::int64_t> last_progress_ns_{0};

  // Loop thread only.
  Links links_;
  std::map<const Flow*, LinkState> flows_;
  std::size_t greeted_count_ = 0;
  std::map<std::uint32_t, UnitState*> units_by_id_;
  bool closing_ = false;
  Status left_;  // a peer or server has said goodbye: nothing can start any more
  std::uint64_t closed_bytes_sent_ = 0;
  std::uint64_t closed_bytes_received_ = 0;

  // Under mutex_.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<UnitState> units_;
  std::deque<LayerState> layers_;
  std::size_t running_count_ = 0;
  bool linked_ = false;
  bool all_closed_ = false;
  Status status_;  // the first failure; everything after it fails alike
  std::uint32_t next_unit_id_ = 0;

  mutable Loop loop_;  // after what its thread uses
  Executor executor_;  // last: its threads post to the loop
};

}  // namespace poseidon
