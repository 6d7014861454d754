// A table with a row for each value of Options::transport.
#include "worker/transports.h"

#include <algorithm>

#include "transport/shm/shm_transport.h"
#include "transport/spread/spread_transport.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/ucx/ucx_transport.h"

namespace poseidon {

namespace {

struct MediumRow {
  Medium medium;
  bool shares_memory;                       // processes of one host use shared memory instead of the network
  bool may_spread;                          // several loops may move a worker's bytes
  bool transport_per_class;                 // a transport marks all its packets alike, so each priority class takes one
  Status (*check)(const Options& options);  // whether the network can be used; null if it always can
  std::unique_ptr<Transport> (*make_network)(const Options& options, int priority_class, const Admission& admission);
};

/// A TCP flow marks its own packets (Flow::set_traffic_class).
std::unique_ptr<Transport> make_tcp(const Options& /*options*/, int /*priority_class*/, const Admission& admission) {
  return make_tcp_transport(admission);
}

constexpr MediumRow kMedia[] = {
    {Medium::automatic, true, true, false, nullptr, make_tcp},
    {Medium::tcp, false, true, false, nullptr, make_tcp},
    {Medium::shm, true, true, false, nullptr, make_tcp},
    {Medium::ucx, false, false, true, check_ucx, make_ucx_transport_for_class},
};

/// `medium` is a value that the table of options allows.
const MediumRow& row_of(Medium medium) { return *std::ranges::find(kMedia, medium, &MediumRow::medium); }

}  // namespace

Status check_transport(const Options& options) {
  const MediumRow& row = row_of(options.transport);
  if (options.worker_cores > 0 && !row.may_spread)
    return {ErrorCode::invalid_argument,
            concat("worker_cores is ", options.worker_cores, ", which is for TCP: leave it at 0 for ucx")};
  return row.check == nullptr ? Status() : row.check(options);
}

Result<WorkerTransports> make_transports(const Options& options) {
  auto admission = admission_of(options);
  if (!admission.ok()) return admission.status();
  if (Status status = check_transport(options); !status.ok()) return status;
  const MediumRow& row = row_of(options.transport);
  WorkerTransports made;
  made.key_id = admission.value().credentials.own().name;
  // A dedicated server has one transport for all classes.
  const int count = row.transport_per_class && options.servers.empty() ? options.priority_classes : 1;
  for (int i = 0; i < count; ++i) made.networks.push_back(row.make_network(options, i, admission.value()));
  if (options.worker_cores > 0)
    for (const auto& network : made.networks)
      made.spread.push_back(make_spread_transport(*network, static_cast<std::size_t>(options.worker_cores)));
  if (row.shares_memory) {
    const Status usable = check_shared_memory();
    // A container may forbid it. The others then reach this process over the network, because it names no address.
    if (usable.ok())
      made.shm = make_shm_transport(admission.value());
    else if (options.transport == Medium::shm)
      return Status(usable.code(), usable.message() + "; use transport=auto");
  }
  return made;
}

std::unique_ptr<Transport> make_server_transport(const Options& options, const Admission& admission) {
  return row_of(options.transport).make_network(options, kNoPriorityClass, admission);
}

}  // namespace poseidon
