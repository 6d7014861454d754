// sfb: every worker sends its factors to every other worker, and every worker multiplies all of them itself. It does so
// in rank order, so that all replicas compute the same bits (Poseidon §3.2).
#pragma once

#include "scheme/scheme.h"

namespace poseidon {

/// A worker whose gradient has no factors in some step sends the dense gradient instead, or says that it has nothing.
/// So the sum stays exact, and no worker asks the others first.
class FactorBroadcast final : public SchemeProtocol {
 public:
  FactorBroadcast();
  void start(Exchange& exchange, const Links& links) const override;
  Result<std::span<std::byte>> accept(Exchange& exchange, const wire::Header& header, bool lent,
                                      const Links& links) const override;
  Status receive(Exchange& exchange, const wire::Header& header, std::span<const std::byte> payload,
                 const Links& links) const override;
  std::string waiting_for(const Exchange& exchange) const override;

  /// accept() and receive() for an inbox, which may be of a step that has not started here yet. A lent payload is
  /// copied, because factors stay until all workers' are here, and a loan of the transport's memory has to be short.
  static Result<std::span<std::byte>> make_room(PeerInbox& inbox, const Exchange& exchange, const wire::Header& header,
                                                const Links& links);
  static void store(PeerInbox& inbox, const Exchange& exchange, const wire::Header& header,
                    std::span<const std::byte> payload);
};

}  // namespace poseidon
