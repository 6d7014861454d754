// hello: a worker says who it is, and joins its job.
#include <optional>
#include <utility>

#include "server/core/connection.h"
#include "server/core/server_core.h"
#include "transport/traffic_class.h"

namespace poseidon {

Status ServerCore::Handlers::hello(ServerCore& core, Connection& from, const wire::Header& header,
                                   std::span<const std::byte> payload) {
  const wire::Hello hello = wire::Hello::read(header, payload);
  const JobName name{from.flow().key_id(), hello.job};
  core.pending_.remove(from.id());
  Status why = from.job != nullptr ? Status(ErrorCode::refused, "a second hello") : core.objection(name, hello);
  const auto job = why.ok() ? core.job_of(name, hello) : Result<Job*>(std::move(why));
  if (!job.ok()) {
    from.refuse(header, job.status());
    from.flow().close(kLinger);
    return {};
  }
  from.rank = hello.rank;
  from.host = hello.host;
  from.join(*job.value());
  core.port_watch_.joined(from.id());
  job.value()->departed.erase(hello.rank);
  from.flow_index = hello.flow;
  from.priority_class = hello.priority_class;
  core.note(FlightEvent::Kind::greeted, from, "");
  // If the system does not permit it, the worker at the other end has reported that.
  static_cast<void>(from.flow().set_traffic_class(traffic_class_of(core.options_, hello.priority_class)));
  if (core.handover_ != nullptr) core.handover_->joined(name, from.id(), hello);
  const bool saves = core.surroundings_.checkpoints != nullptr;
  from.send_text(wire::Hello{0, hello.worker_count, hello.job, hello.flow, core.other_cores_, hello.priority_class,
                             hello.generation, wire::Pace(), hello.run, std::nullopt, saves}
                     .make(),
                 [] {});
  return {};
}

}  // namespace poseidon
