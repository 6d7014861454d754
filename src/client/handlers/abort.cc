// abort: the process at the other end has failed.
#include "client/client_impl.h"
#include "wire/messages/ending.h"

namespace poseidon {

Status ClientImpl::Handlers::abort(ClientImpl& client, LinkState& link, const wire::Header& header,
                                   std::span<const std::byte> payload) {
  const auto abort = wire::Abort::read(header, payload);
  FailureCause cause = FailureCause::of(FailureSource::told, link);
  cause.planned = abort.planned;
  client.fail(abort.status, cause);
  return {};
}

}  // namespace poseidon
