// The search for the fastest chunk size. It is measured, because it depends on links, memory and cores alike (Parameter
// Hub §4.6: larger chunks use the network better, smaller chunks overlap better).
#pragma once

#include <cstddef>
#include <functional>

#include "client/steps.h"
#include "poseidon/client.h"

namespace poseidon {

/// See Client::choose_chunk_bytes. `steps` are the client's own.
Result<std::size_t> choose_chunk_bytes(Client& client, Steps& steps, std::size_t known,
                                       const std::function<bool()>& keep_waiting);

}  // namespace poseidon
