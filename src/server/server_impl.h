// ServerImpl: a server's cores. They share nothing; a worker talks to each of them on flows of its own.
#pragma once

#include <chrono>
#include <cstdint>
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
  /// Serves `options.job` only where options.world_size > 0 (embedded), any job otherwise. It has one
  /// core for each of `loops`, which may also serve others; without any it makes as many as
  /// options.server_cores and options.interfaces ask for.
  explicit ServerImpl(const Options& options, std::vector<std::shared_ptr<Loop>> loops = {});
  ~ServerImpl() override;

  std::size_t core_count() const { return cores_.size(); }

  /// Accepts workers through one more transport. Core i listens on address i of as many as there are
  /// cores; one address stands for all: a fixed port then grows by one from core to core, port 0 is any.
  /// Transports must outlive this. The addresses are told to workers in the answer to their hello.
  Status listen(Transport& transport, const std::vector<std::string>& addresses);
  Status listen(Transport& transport, const std::string& address) { return listen(transport, std::vector{address}); }
  /// The same through a transport that this server keeps.
  Status listen(std::unique_ptr<Transport> transport, const std::vector<std::string>& addresses) {
    owned_transport_ = std::move(transport);
    return listen(*owned_transport_, addresses);
  }

  /// Of the first core, on the first transport.
  std::string address() const override { return addresses_.empty() ? "" : addresses_.front(); }
  /// Of every core, on the transport that was listened on last.
  const std::vector<std::string>& last_addresses() const { return last_addresses_; }

  std::vector<std::string> notices() const override;

  void shutdown() override;
  /// The same, but gives what is queued for the workers up to `linger` to leave.
  void shutdown(std::chrono::milliseconds linger);

  /// Adds what the cores know to a flight record, as one value. Any thread but theirs; waits for them.
  void report(JsonWriter& json, std::int64_t time_ns);

  /// The ranks that steps have been ended without, by rank, as far as this server knows; in at least so many. Any
  /// thread but the cores'.
  std::vector<LateRank> late_ranks();

  /// Network bytes of all flows so far: sent, received. Any thread but the cores'.
  std::pair<std::uint64_t, std::uint64_t> traffic();

 private:
  std::unique_ptr<Transport> owned_transport_;     // null where someone else keeps it
  std::unique_ptr<ThreadedSum> wide_;              // Aggregation::wide only
  std::unique_ptr<ServerRecords> records_;         // of a server that stands alone
  std::unique_ptr<CheckpointWriter> checkpoints_;  // null: nothing is saved
  Status checkpoint_status_;                       // of their directory
  mutable std::mutex mutex_;
  mutable std::vector<std::string> notices_;         // under mutex_: in the order in which they were asked for
  mutable std::size_t checkpoint_notice_count_ = 0;  // under mutex_: of those in `notices_`
  std::size_t late_notice_count_ = 0;                // under mutex_: of late ranks
  std::vector<std::string> addresses_;               // of every core, on the first transport
  std::vector<std::string> last_addresses_;
  std::vector<std::unique_ptr<ServerCore>> cores_;
};

}  // namespace poseidon
