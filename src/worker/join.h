// How a process joins a job: it meets the other workers, hosts a server, and connects its client to all of them. This
// is the one place that knows both client and server, which themselves meet only in the wire format.
#pragma once

#include <functional>
#include <memory>

#include "poseidon/client.h"
#include "worker/transports.h"

namespace poseidon {

/// As Client::connect, whose checks the options have passed, over the given transports, which end with the client.
/// `store` is not null.
Result<std::unique_ptr<Client>> join_job(const Options& options, std::shared_ptr<Store> store,
                                         const std::function<bool()>& keep_waiting, WorkerTransports transports);

}  // namespace poseidon
