// Shared-memory transport: between processes of one host, or threads of one process.
#pragma once

#include <memory>

#include "transport/admission.h"
#include "transport/transport.h"

namespace poseidon {

/// Addresses are names of Unix sockets in the abstract namespace (up to 107 bytes), which belong to the network
/// namespace. An address that ends in ":0" listens on a free name. Only processes of the same user can connect.
///
/// A payload of up to a quarter of a direction's memory is lent to the receiver. The receiver reads the shared memory
/// to which the sender has copied the payload. The sending process could still change those bytes. So a receiver must
/// not check the bytes and then read them there again. Larger payloads are copied piece by piece to the memory that
/// accept returns. So are all payloads while half of the memory is lent and not yet released.
///
/// Both ends prove that they know the secret before they share anything.
std::unique_ptr<Transport> make_shm_transport(const Admission& admission);
inline std::unique_ptr<Transport> make_shm_transport() { return make_shm_transport(Admission()); }

/// Whether this process may share memory at all: a container or a filter of system calls may forbid it. It tries.
Status check_shared_memory();

}  // namespace poseidon
