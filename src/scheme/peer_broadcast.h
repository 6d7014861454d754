// PeerBroadcast: every worker sends its part to every other worker, and makes the result of all parts itself. It does
// so in rank order, so that all replicas compute the same bits (Poseidon §3.2).
#pragma once

#include "scheme/scheme.h"

namespace poseidon {

/// A derived scheme says what a part is and how a result is made of all parts. A worker whose gradient is dense in some
/// step sends the dense gradient instead, or says that it has nothing. So the sum stays exact, and no worker asks the
/// others first.
class PeerBroadcast : public SchemeProtocol {
 public:
  void start(Exchange& exchange, const Links& links) const final;
  Result<std::span<std::byte>> accept(Exchange& exchange, const wire::Header& header, bool lent,
                                      const Links& links) const final;
  Status receive(Exchange& exchange, const wire::Header& header, std::span<const std::byte> payload,
                 const Links& links) const final;
  std::string waiting_for(const Exchange& exchange) const final;

  /// accept() and receive() for an inbox, which may be of a step that has not started here yet. A lent payload is
  /// copied, because parts stay until all workers' are here, and a loan of the transport's memory has to be short.
  Result<std::span<std::byte>> make_room(PeerInbox& inbox, const Exchange& exchange, const wire::Header& header,
                                         const Links& links) const;
  Status store(PeerInbox& inbox, const Exchange& exchange, const wire::Header& header,
               std::span<const std::byte> payload) const;

 protected:
  using Pieces = std::vector<std::span<const std::byte>>;

  /// `kind` is that of the parts' messages.
  PeerBroadcast(const SchemeTraits& traits, wire::Kind kind) : SchemeProtocol(traits), kind_(kind) {}

 private:
  /// Makes this worker's part of a gradient in the scheme's own form. Completes `body`, and returns the payload.
  virtual Pieces make_part(Exchange& exchange, const Links& links, Part& own, wire::Contribution& body) const = 0;
  /// Returns the size of a part that is neither dense nor absent. Empty if the layer cannot have such a part.
  virtual std::optional<std::uint64_t> part_bytes(const Exchange& exchange, const wire::Contribution& body) const = 0;
  /// Takes a part whose payload is in part.buffer.
  virtual Status read_part(const Exchange& exchange, const wire::Contribution& body, Part& part) const = 0;
  /// Makes the result of the parts, all of which are here.
  virtual void finish(Exchange& exchange, const Links& links) const = 0;

  void finish_if_complete(Exchange& exchange, const Links& links) const;

  const wire::Kind kind_;
};

/// Runs `job` for 0 to job_count − 1 on the executor. Afterwards the exchange goes on.
void compute(Exchange& exchange, const Links& links, std::size_t job_count, std::function<void(std::size_t)> job);

/// Returns the scheme of the parts that peers send each other for this unit.
const PeerBroadcast& peer_broadcast_of(const ExchangeUnit& about);

}  // namespace poseidon
