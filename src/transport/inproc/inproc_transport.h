// In-process transport: flows between loops of one process; payloads are lent, not copied.
#pragma once

#include <memory>
#include <string>

#include "transport/transport.h"

namespace poseidon {

/// Addresses are any text; a listener and its connectors must share the transport object. Text
/// that ends in ":0" listens on an address of its own, as port 0 does with TCP.
///
/// A payload of one piece is lent to the peer (Receiver::on_message with `release`); one of several
/// pieces is copied into what its accept gives. A flow ends, for its own receiver, when every
/// payload that it lent has been released: no `done` comes after on_closed.
/// Nobody has to prove anything; the flows say that both ends know the secret `key_id`.
std::unique_ptr<Transport> make_inproc_transport(std::string key_id);
inline std::unique_ptr<Transport> make_inproc_transport() { return make_inproc_transport(std::string()); }

}  // namespace poseidon
