// Puts a worker together: client, embedded server and what carries their messages. The one place that knows both;
// they themselves meet only in the wire format.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "poseidon/client.h"
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

/// Client::connect over the given transports, which end with the client. `store` is not null.
Result<std::unique_ptr<Client>> connect_worker(const Options& options, std::shared_ptr<Store> store,
                                               const std::function<bool()>& keep_waiting, WorkerTransports transports);

}  // namespace poseidon
