// TcpStore: the Store that rank 0 serves when no agent (torchrun) holds one.
#pragma once

#include <functional>
#include <memory>

#include "poseidon/options.h"
#include "poseidon/store.h"

namespace poseidon {

/// Rank 0 binds master_addr:master_port and serves until the returned Store is destroyed; every
/// rank, 0 too, connects to it. Both ends prove that they know options.secret. Blocks until connected or
/// options.timeout has passed. `keep_waiting` is asked now and then and may return false to give up
/// (ErrorCode::aborted). ErrorCode::unreachable names the address and what to check; refused when rank 0 has another
/// secret.
///
/// When a connection ends, set (for 2 s) and get (until its own timeout) connect again and repeat the request: rank 0
/// may have begun again, with an empty store. Unless OnFailure::abort a process of its host that comes first serves in
/// its place. ErrorCode::unreachable is then no more than that nobody served it in that time. A get of 0 ms takes about
/// 100 ms at most.
Result<std::shared_ptr<Store>> open_tcp_store(const Options& options, const std::function<bool()>& keep_waiting);

}  // namespace poseidon
