// UCX transport: RDMA (InfiniBand, RoCE), shared memory or TCP, whichever UCX finds. Optional at build time.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "poseidon/options.h"
#include "transport/admission.h"
#include "transport/transport.h"

namespace poseidon {

/// UCX's own settings by their names without "UCX_", e.g. {"TLS", "rc,sm,self"}, {"NET_DEVICES", "mlx5_0:1"} or
/// {"IB_SL", "3"}. They beat UCX's environment variables, which hold for everything not named here. Those that begin
/// with "IB_" are for RDMA devices and count only where UCX uses one.
/// A transport has one set: flows of different priority classes take a transport each (docs/ucx.md).
using UcxSettings = std::vector<std::pair<std::string, std::string>>;

/// Whether this build has UCX.
bool ucx_available();
/// Whether options with transport=ucx can be followed. ErrorCode::invalid_argument for options.tls, because UCX sends
/// unencrypted, and in a build without UCX.
Status check_ucx(const Options& options);

/// Null when the build has no UCX. A setting that UCX rejects shows as the invalid_argument of every listen and
/// connect.
///
/// Addresses are "host:port" (IPv6 in brackets); port 0 binds any free one. A loop that uses the transport
/// gets a UCX worker, which lives as long as the loop.
///
/// A payload is received into what accept gives; a flow receives one at a time, and on_progress is not called.
/// A flow has about 1 MiB or two messages in UCX's hands; what waits for its turn leaves by its priority.
/// Marks (Flow::set_traffic_class) are the transport's settings, not the flow's: nothing to do for it.
/// bytes_sent and bytes_received count headers and payloads of complete messages, over whatever medium
/// UCX has chosen: it tells neither its own framing nor whether a network was crossed.
/// Messages of up to kUcxEagerBytes may be with the peer before it has a receiver, in memory of its engine:
/// only larger ones are held back until then, at their sender.
/// A close without linger may lose messages whose send is done, as the reset of a TCP connection does.
/// Both ends prove that they know the secret in their first messages; of anything else that comes before, nothing is
/// parsed but what UCX itself parses.
std::unique_ptr<Transport> make_ucx_transport(const UcxSettings& settings, const Admission& admission);
inline std::unique_ptr<Transport> make_ucx_transport(const UcxSettings& settings = {}) {
  return make_ucx_transport(settings, Admission());
}

/// The priority class of a transport whose packets carry no mark.
inline constexpr int kNoPriorityClass = -1;

/// A transport whose packets carry the mark of `priority_class`, from 0, as far as UCX's device has marks. Null when
/// the build has no UCX.
std::unique_ptr<Transport> make_ucx_transport_for_class(const Options& options, int priority_class,
                                                        const Admission& admission);

/// Payloads above it are sent by rendezvous: straight into place, when the receiver takes them. Below, UCX decides.
inline constexpr std::size_t kUcxEagerBytes = std::size_t{32} << 10;

}  // namespace poseidon
