// The transports of a process, as its options ask for them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "poseidon/options.h"
#include "transport/admission.h"
#include "transport/transport.h"

namespace poseidon {

/// The transports from a worker to other workers and to servers. Its own server has a further transport (inproc).
struct WorkerTransports {
  /// One for all priority classes, or one for each class. They listen on "HOST:0" for a HOST of `listen_hosts`.
  std::vector<std::unique_ptr<Transport>> networks;
  /// The same networks for the worker's client, whose bytes other loops move. Empty: the client's loop moves them.
  std::vector<std::unique_ptr<Transport>> spread;
  /// For processes of the same host. It listens on ":0". If it is null, the networks connect these processes, too.
  std::unique_ptr<Transport> shm;
  /// The name of the secret that their flows prove (Flow::key_id). Flows inside the process report the same name.
  std::string key_id{};

  /// The networks of the client.
  const std::vector<std::unique_ptr<Transport>>& of_client() const { return spread.empty() ? networks : spread; }
};

/// Checks whether this build has the transport that the options ask for, and whether that transport supports the other
/// options. ErrorCode::invalid_argument says why not.
Status check_transport(const Options& options);

/// The transports that the options ask for. Errors are those of check_transport and admission_of.
Result<WorkerTransports> make_transports(const Options& options);

/// The transport with which a dedicated server listens. The options must have passed check_transport.
std::unique_ptr<Transport> make_server_transport(const Options& options, const Admission& admission);

}  // namespace poseidon
