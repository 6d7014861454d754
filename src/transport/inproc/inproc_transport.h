// In-process transport: flows between loops of one process. Payloads are lent, not copied.
#pragma once

#include <memory>
#include <string>

#include "transport/transport.h"

namespace poseidon {

/// Addresses are any text. A listener and its connectors must share the transport object. Text that ends in ":0"
/// listens on an address of its own, as port 0 does with TCP.
///
/// A payload of one piece is lent to the peer (Receiver::on_message with `release`). A payload of several pieces is
/// copied to the memory that the peer's accept returns. A flow's own receiver gets on_closed when every payload that
/// the flow lent has been released. So no `done` comes after on_closed.
///
/// Nobody has to prove a secret. The flows report that both ends know the secret `key_id`.
std::unique_ptr<Transport> make_inproc_transport(std::string key_id);
inline std::unique_ptr<Transport> make_inproc_transport() { return make_inproc_transport(std::string()); }

}  // namespace poseidon
