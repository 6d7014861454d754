// UCX transport: RDMA (InfiniBand, RoCE), shared memory or TCP, whichever UCX finds. It is optional at build time.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "poseidon/options.h"
#include "transport/admission.h"
#include "transport/transport.h"

namespace poseidon {

/// UCX's own settings, by their names without "UCX_". Examples are {"TLS", "rc,sm,self"}, {"NET_DEVICES", "mlx5_0:1"}
/// and {"IB_SL", "3"}. They override UCX's environment variables, which apply to everything that is not named here.
/// Settings that begin with "IB_" are for RDMA devices and count only if UCX uses one.
///
/// A transport has one set of settings. So flows of different priority classes use one transport each (docs/ucx.md).
using UcxSettings = std::vector<std::pair<std::string, std::string>>;

/// Whether this build has UCX.
bool ucx_available();
/// Whether options with transport=ucx can be followed. ErrorCode::invalid_argument: options.tls is set, but UCX sends
/// unencrypted; or the build has no UCX.
Status check_ucx(const Options& options);

/// Returns null if the build has no UCX. If UCX rejects a setting, every listen and connect returns
/// ErrorCode::invalid_argument.
///
/// Addresses are "host:port" (IPv6 in brackets). Port 0 binds any free port. A loop that uses the transport gets a UCX
/// worker, which lives as long as the loop.
///
/// A payload is received into the memory that accept returns. A flow receives one payload at a time, and on_progress is
/// not called.
///
/// UCX has about 1 MiB or two messages of a flow at a time. The messages that wait leave by their priority.
///
/// Marks (Flow::set_traffic_class) are settings of the transport, so the flow does nothing for them.
///
/// bytes_sent and bytes_received count headers and payloads of complete messages, whatever medium UCX has chosen. UCX
/// does not tell its own framing, nor whether a network was crossed.
///
/// Messages of up to kUcxEagerBytes may reach the peer before it has a receiver, and then lie in memory of its engine.
/// Only larger messages are held back at their sender until then.
///
/// A close without linger may lose messages whose send is done, as the reset of a TCP connection does.
///
/// Both ends prove that they know the secret in their first messages. Of anything else that comes before, only UCX
/// itself parses anything.
std::unique_ptr<Transport> make_ucx_transport(const UcxSettings& settings, const Admission& admission);
inline std::unique_ptr<Transport> make_ucx_transport(const UcxSettings& settings = {}) {
  return make_ucx_transport(settings, Admission());
}

/// The priority class of a transport whose packets carry no mark.
inline constexpr int kNoPriorityClass = -1;

/// Makes a transport whose packets carry the mark of `priority_class`, from 0, as far as UCX's device has marks.
/// Returns null if the build has no UCX.
std::unique_ptr<Transport> make_ucx_transport_for_class(const Options& options, int priority_class,
                                                        const Admission& admission);

/// Larger payloads are sent by rendezvous, directly into their memory, when the receiver takes them. For smaller ones
/// UCX decides.
inline constexpr std::size_t kUcxEagerBytes = std::size_t{32} << 10;

}  // namespace poseidon
