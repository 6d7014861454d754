// TcpStore: the Store that rank 0 serves when no agent (torchrun) holds one.
//
// Protocol, little-endian: request = op byte ('S' set, 'G' get), key length u32, value length u32,
// key, value; answer = value length u32, value ('S': empty). A get of a key that is not set is
// answered with the length 0xffffffff.
#pragma once

#include <functional>
#include <memory>

#include "poseidon/options.h"
#include "poseidon/store.h"

namespace poseidon {

/// Rank 0 binds master_addr:master_port and serves until the returned Store is destroyed; every
/// rank, 0 too, connects to it. Blocks until connected or options.timeout has passed.
/// `keep_waiting` is asked now and then and may return false to give up (ErrorCode::aborted).
/// ErrorCode::unreachable names the address and what to check.
Result<std::shared_ptr<Store>> open_tcp_store(const Options& options, const std::function<bool()>& keep_waiting);

}  // namespace poseidon
