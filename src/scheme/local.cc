// local: a single worker has nothing to send to others. Its gradients go through its own server, which may keep values
// and update them.
#include "scheme/parameter_server.h"

namespace poseidon {

namespace {

SchemeCost no_cost(std::size_t, std::size_t, double, const Cluster&) { return {}; }

}  // namespace

const SchemeProtocol& local_scheme() {
  static const ParameterServer scheme({
      .title = "nothing to send",
      .summary = "One worker: nothing to send.",
      .converts = true,
      .only_one_worker = true,
      .uses_servers = true,
      .can_drop_late = true,
      .cost = no_cost,
  });
  return scheme;
}

}  // namespace poseidon
