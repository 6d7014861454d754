// Which transports carry a worker's messages.
#include <algorithm>
#include <string>
#include <utility>

#include "transport/admission.h"
#include "transport/shm/shm_transport.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/traffic_class.h"
#include "transport/ucx/ucx_transport.h"
#include "worker/worker.h"

namespace poseidon {

namespace {

/// RoCE's traffic class is the DSCP and two bits more, which say that ECN is understood; InfiniBand's service
/// levels rise with the urgency.
UcxSettings ucx_settings(const Options& options, int priority_class) {
  const int dscp = traffic_class_of(options, static_cast<std::size_t>(priority_class)).dscp;
  const int service_level = std::min(7, options.priority_classes - 1 - priority_class);
  if (dscp == 0 && service_level == 0) return {};
  return {{"IB_TRAFFIC_CLASS", std::to_string(dscp << 2 | 2)}, {"IB_SL", std::to_string(service_level)}};
}

}  // namespace

Result<WorkerTransports> make_transports(const Options& options) {
  auto admission = admission_of(options);
  if (!admission.ok()) return admission.status();
  WorkerTransports made;
  made.key_id = admission.value().credentials.own().name;
  if (options.transport == Medium::ucx) {
    if (options.tls) return Status(ErrorCode::invalid_argument, kUcxHasNoTls);
    if (!ucx_available()) return Status(ErrorCode::invalid_argument, kNoUcx);
    // UCX has a traffic class for all that one transport sends. Dedicated servers have one for all classes.
    const int count = options.servers.empty() ? options.priority_classes : 1;
    for (int i = 0; i < count; ++i)
      made.networks.push_back(make_ucx_transport(ucx_settings(options, i), admission.value()));
  } else {
    made.networks.push_back(make_tcp_transport(admission.value()));
  }
  if (options.transport == Medium::automatic || options.transport == Medium::shm)
    made.shm = make_shm_transport(admission.value());
  return made;
}

}  // namespace poseidon
