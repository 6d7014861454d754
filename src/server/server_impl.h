// ServerImpl: a loop, its listeners, the workers' flows and the shard they talk to.
#pragma once

#include <chrono>
#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "poseidon/server.h"
#include "server/shard.h"
#include "transport/transport.h"
#include "wire/messages.h"

namespace poseidon {

class ServerImpl final : public Server, private Receiver {
 public:
  /// Serves `options.job` only where options.world_size > 0 (embedded), any job otherwise.
  explicit ServerImpl(const Options& options);
  ~ServerImpl() override;

  /// Accepts workers through one more transport (TCP, in-process). The transport must outlive this.
  Status listen(Transport& transport, const std::string& address);
  /// The same through a transport that this server keeps.
  Status listen(std::unique_ptr<Transport> transport, const std::string& address) {
    owned_transport_ = std::move(transport);
    return listen(*owned_transport_, address);
  }

  std::string address() const override { return address_; }
  void shutdown() override;
  /// The same, but gives what is queued for the workers up to `linger` to leave.
  void shutdown(std::chrono::milliseconds linger);

  /// Network bytes of all flows so far: sent, received. Any thread but the loop's.
  std::pair<std::uint64_t, std::uint64_t> traffic();

 private:
  /// One job's chunks and workers: from its first hello until its last worker has gone.
  struct Job {
    std::string name;
    std::uint32_t worker_count;
    std::map<std::uint32_t, Flow*> workers;  // by rank
    Shard shard;
    Job(std::string name, std::uint32_t worker_count);
    void send_result(std::uint32_t rank, const wire::Header& header, const std::shared_ptr<Buffer>& payload);
  };
  struct Connection {
    std::shared_ptr<Flow> flow;
    Buffer receiving;    // where the message under way lands
    Job* job = nullptr;  // null until its hello
  };

  Result<std::span<std::byte>> on_header(Flow& flow, const wire::Header& header) override;
  Status on_message(Flow& flow, const wire::Header& header, std::span<const std::byte> payload,
                    std::function<void()> release) override;
  void on_closed(Flow& flow, const Status& status) override;

  void accept(std::shared_ptr<Flow> flow);
  Status greet(Flow& flow, const wire::Header& header, std::span<const std::byte> payload);
  std::string objection(const wire::Hello& hello) const;
  void check_overdue();

  Options options_;
  std::unique_ptr<Transport> owned_transport_;  // null where someone else keeps it
  std::vector<std::unique_ptr<Listener>> listeners_;
  std::string address_;  // of the first listener
  std::map<std::string, Job> jobs_;
  std::map<const Flow*, Connection> connections_;
  std::uint64_t closed_bytes_sent_ = 0;  // of flows that are gone
  std::uint64_t closed_bytes_received_ = 0;
  bool shut_down_ = false;  // the owner's thread
  bool stopping_ = false;   // the loop's
  std::promise<void> all_closed_;
  Loop loop_;  // last: its thread ends before what it uses
};

}  // namespace poseidon
