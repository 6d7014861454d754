// How a process joins a job: it meets the other workers, hosts a server, and connects its client to all of them. This
// is the one place that knows both client and server, which themselves meet only in the wire format.
#pragma once

#include <functional>
#include <memory>

#include "poseidon/client.h"
#include "worker/transports.h"

namespace poseidon {

/// Does what Client::connect does after its checks. The transports end with the client. `store` must not be null.
Result<std::unique_ptr<Client>> join_job(const Options& options, std::shared_ptr<Store> store,
                                         const std::function<bool()>& keep_waiting, WorkerTransports transports);

}  // namespace poseidon
