// What carries the messages of a process, as the options say.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "poseidon/options.h"
#include "transport/admission.h"
#include "transport/transport.h"

namespace poseidon {

/// What carries a worker's messages to other workers and servers. Within the process it has a transport of its own.
struct WorkerTransports {
  /// One for all priority classes, or one for each. They listen on "HOST:0", HOST one of `listen_hosts`.
  std::vector<std::unique_ptr<Transport>> networks;
  /// For processes of the same host, which listens on ":0"; null: the networks do that, too.
  std::unique_ptr<Transport> shm;
  /// Of the secret that their flows have proved (Flow::key_id); those within the process say the same.
  std::string key_id{};
};

/// Whether this build has the transport that the options ask for, and the transport can do what they ask of it.
/// ErrorCode::invalid_argument otherwise.
Status check_transport(const Options& options);

/// The transports that the options ask for. Errors are those of check_transport and admission_of.
Result<WorkerTransports> make_transports(const Options& options);

/// What a dedicated server listens with. The options have passed check_transport.
std::unique_ptr<Transport> make_server_transport(const Options& options, const Admission& admission);

}  // namespace poseidon
