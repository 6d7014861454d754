// ServerImpl: a server's cores. They share no data. A worker has separate flows to each of them.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "poseidon/server.h"
#include "server/checkpoint/checkpoint_writer.h"
#include "server/core/server_core.h"
#include "server/server_records.h"
#include "transport/transport.h"

namespace poseidon {

class ServerImpl final : public Server {
 public:
  /// An embedded server (options.world_size > 0) serves only `options.job`; any other server serves all jobs. It has
  /// one core for each of `loops`, which may also serve others. Without `loops` it makes as many cores as
  /// options.server_cores and options.interfaces ask for.
  explicit ServerImpl(const Options& options, std::vector<std::shared_ptr<Loop>> loops = {});
  ~ServerImpl() override;

  std::size_t core_count() const { return cores_.size(); }

  /// Accepts workers through one more transport. Core i listens on address i if there are as many addresses as cores.
  /// One address stands for all cores: a fixed port then grows by one from core to core, and port 0 means any port. The
  /// transport must outlive the server. Workers get the addresses in the answer to their hello.
  Status listen(Transport& transport, const std::vector<std::string>& addresses);
  Status listen(Transport& transport, const std::string& address) { return listen(transport, std::vector{address}); }
  /// Does the same through a transport that this server owns.
  Status listen(std::unique_ptr<Transport> transport, const std::vector<std::string>& addresses) {
    owned_transport_ = std::move(transport);
    return listen(*owned_transport_, addresses);
  }

  /// Returns the address of the first core, on the first transport.
  std::string address() const override { return addresses_.empty() ? "" : addresses_.front(); }
  /// Returns the address of every core, on the transport of the last `listen`.
  const std::vector<std::string>& last_addresses() const { return last_addresses_; }

  std::vector<std::string> notices() const override;

  void shutdown() override;
  /// Shuts down, but gives messages that are queued for the workers up to `linger` to leave.
  void shutdown(std::chrono::milliseconds linger);

  /// Returns when all workers have left that may ask for values here, or `keep_serving` returns false.
  void serve_on(const std::function<bool()>& keep_serving);

  ServerReport report() override;
  void drain() override { tenants_->drain(); }
  bool draining() const override { return tenants_->draining(); }
  bool drained() const override { return tenants_->drained(); }
  bool evict(const std::string& job, std::size_t secret) override;
  /// Sets the names of the secrets (wire::Key::name), for JobReport::secret. Call it before `listen`.
  void name_secrets(std::vector<std::string> key_ids) { key_ids_ = std::move(key_ids); }

  /// Adds one value to a flight record: what the cores know. Any thread but theirs may call it (ServerCore checks
  /// it). It waits for them.
  void report(JsonWriter& json, std::int64_t time_ns);

  /// Returns the ranks without which steps have ended, by rank. The numbers of steps are those that this server knows,
  /// so they are lower bounds. Any thread but the cores' may call it (ServerCore checks it).
  std::vector<LateRank> late_ranks();

  /// Returns the network bytes of all flows so far. Any thread but the cores' may call it (ServerCore
  /// checks it).
  TrafficStats traffic();

 private:
  std::size_t secret_of(const JobName& job) const;

  const std::shared_ptr<Tenants> tenants_;
  std::vector<std::string> key_ids_;
  std::unique_ptr<Transport> owned_transport_;     // null if the caller owns it
  std::unique_ptr<ThreadedSum> wide_;              // with Aggregation::wide only
  std::unique_ptr<ServerRecords> records_;         // of a dedicated server only
  std::unique_ptr<CheckpointWriter> checkpoints_;  // null: nothing is saved
  Status checkpoint_status_;                       // the status of the checkpoints' directory
  mutable std::mutex mutex_;
  mutable std::vector<std::string> notices_;         // under mutex_; in the order in which they were asked for
  mutable std::size_t checkpoint_notice_count_ = 0;  // under mutex_; how many of `notices_` are about checkpoints
  std::size_t late_notice_count_ = 0;                // under mutex_; how many are about late ranks
  std::vector<std::string> addresses_;               // the address of every core, on the first transport
  std::vector<std::string> last_addresses_;
  std::vector<std::unique_ptr<ServerCore>> cores_;
};

}  // namespace poseidon
