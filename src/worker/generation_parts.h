// GenerationParts: the parts of a worker in one generation, besides its client.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/worker_parts.h"
#include "poseidon/client.h"
#include "server/server_impl.h"
#include "transport/inproc/inproc_transport.h"
#include "worker/transports.h"

namespace poseidon {

/// The transports, the store and the embedded server of a worker in one generation.
class GenerationParts final : public WorkerParts {
 public:
  GenerationParts(std::shared_ptr<const WorkerTransports> transports, std::chrono::milliseconds server_linger)
      : transports_(std::move(transports)),
        inproc_(make_inproc_transport(transports_->key_id)),
        server_linger_(server_linger) {}

  /// The transport between the client and the server of this process.
  Transport& inproc() const { return *inproc_; }
  /// The embedded server, or null if there is none.
  ServerImpl* server() const { return server_.get(); }
  void set_server(std::unique_ptr<ServerImpl> server) { server_ = std::move(server); }
  /// Keeps the store until shutdown(), at the latest until these parts are destroyed.
  void set_store(std::shared_ptr<Store> store) { store_ = std::move(store); }
  void add_notice(std::string notice) { notices_.push_back(std::move(notice)); }

  std::vector<std::string> notices() const override {
    auto all = notices_;
    if (server_) std::ranges::copy(server_->notices(), std::back_inserter(all));
    return all;
  }
  std::vector<LateRank> late_ranks() const override {
    return server_ ? server_->late_ranks() : std::vector<LateRank>();
  }
  TrafficStats server_traffic() const override { return server_ ? server_->traffic() : TrafficStats(); }
  void serve_on(const std::function<bool()>& keep_serving) override {
    if (server_) server_->serve_on(keep_serving);
  }
  void shutdown(bool failed) override {
    // This rank may have finished while its server still sends the last results over a slow link.
    if (server_ && failed) server_->shutdown();
    if (server_ && !failed) server_->shutdown(server_linger_);
    store_.reset();  // its port is free when this returns
  }

 private:
  // The members are destroyed in the reverse order.
  std::shared_ptr<Store> store_;
  const std::shared_ptr<const WorkerTransports> transports_;
  const std::unique_ptr<Transport> inproc_;
  std::unique_ptr<ServerImpl> server_;
  const std::chrono::milliseconds server_linger_;
  std::vector<std::string> notices_;
};

}  // namespace poseidon
