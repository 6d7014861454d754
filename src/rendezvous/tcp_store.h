// TcpStore: the Store that rank 0 serves if no agent (torchrun) serves one.
#pragma once

#include <functional>
#include <memory>

#include "poseidon/options.h"
#include "poseidon/store.h"

namespace poseidon {

/// Opens the store. Rank 0 binds master_addr:master_port and serves until the returned Store is destroyed. Every rank,
/// including rank 0, connects to it. Both ends prove that they know options.secret. Blocks until it is connected or
/// options.timeout has passed. `keep_waiting` is called from time to time; it may return false to give up, which gives
/// ErrorCode::aborted. ErrorCode::unreachable names the address and says what to check. ErrorCode::refused: rank 0 has
/// another secret.
///
/// If the connection ends, set (for 2 s) and get (until its own timeout) connect again and repeat the request, because
/// rank 0 may have begun again, with an empty store. Except with OnFailure::abort, the first process of rank 0's host
/// that comes may serve the store in its place. ErrorCode::unreachable then only means that nobody served it in that
/// time. A get with a timeout of 0 takes about 100 ms at most.
Result<std::shared_ptr<Store>> open_tcp_store(const Options& options, const std::function<bool()>& keep_waiting);

}  // namespace poseidon
