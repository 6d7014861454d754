// refuse: a server refuses a request of this worker.
#include "client/client_impl.h"
#include "wire/messages/ending.h"

namespace poseidon {

Status ClientImpl::Handlers::refuse(ClientImpl& client, LinkState& link, const wire::Header& header,
                                    std::span<const std::byte> payload) {
  const auto refuse = wire::Refuse::read(header, payload);
  const auto unit = client.units_by_id_.find(header.unit);
  const Status& reason = refuse.status;
  const bool overdue = reason.code() == ErrorCode::timeout;
  Status status = overdue ? Status(reason.code(), reason.message() + client.connections_.last_heard()) : reason;
  if (unit != client.units_by_id_.end())
    status = status.with_context(
        concat("step ", header.step, ", layer '", unit->second->syncer.unit().name, "', chunk ", header.chunk));
  client.fail(status.with_context(client.connections_.here() + " was told by " + client.connections_.describe(link)),
              refuse.departed_rank ? FailureCause{FailureSource::left, FlightEvent::Party::peer, *refuse.departed_rank}
                                   : FailureCause::of(overdue ? FailureSource::silent : FailureSource::refused, link));
  return {};
}

}  // namespace poseidon
