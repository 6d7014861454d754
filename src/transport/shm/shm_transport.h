// Shared-memory transport: between processes of one host, or threads of one process.
#pragma once

#include <memory>

#include "transport/admission.h"
#include "transport/transport.h"

namespace poseidon {

/// Addresses are names of Unix sockets in the abstract namespace (up to 107 bytes), which belong to the network
/// namespace; one that ends in ":0" listens on a free name of its own. Only processes of the same user meet.
///
/// A payload of up to a quarter of a direction's memory is lent to the receiver: it reads the shared memory that
/// the sender has copied it to. The sending process could still change those bytes, so a receiver must not check
/// what they say and then read it there again. Larger payloads, and all while half of the memory is lent and not
/// yet released, are copied piece by piece to where accept says.
/// Both ends prove that they know the secret before they share anything.
std::unique_ptr<Transport> make_shm_transport(const Admission& admission);
inline std::unique_ptr<Transport> make_shm_transport() { return make_shm_transport(Admission()); }

}  // namespace poseidon
