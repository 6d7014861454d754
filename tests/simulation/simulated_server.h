// SimulatedServer: a dedicated server of a simulated cluster, started again when it dies.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "server/server_impl.h"
#include "simulation/simulated_worker.h"

namespace poseidon::testing {

/// One thread uses it. A started server knows nothing, and its address stays the same.
class SimulatedServer {
 public:
  SimulatedServer(SimulatedCluster& cluster, int slot) : cluster_(cluster), slot_(slot) { begin_process(); }

  /// The address on which the server of this slot listens.
  static std::string address_in(int slot) { return "s" + std::to_string(slot) + ":1"; }

  void supervise() {
    if (node_->dead) begin_process();
  }

 private:
  void begin_process() {
    server_.reset();
    node_ = cluster_.network->add_node(slot_, false);
    Options options = cluster_.options;
    options.world_size = 0;  // of any job
    options.servers.clear();
    server_ = std::make_unique<ServerImpl>(options);
    if (Status status = server_->listen(cluster_.network->transport(node_), {address_in(slot_)}); !status.ok())
      cluster_.report(node_->name + ": " + status.message());
  }

  SimulatedCluster& cluster_;
  const int slot_;
  std::shared_ptr<Node> node_;
  std::unique_ptr<ServerImpl> server_;
};

}  // namespace poseidon::testing
