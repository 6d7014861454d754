// The workers of one machine add up their gradients of a chunk among themselves, and then the machines of one rack do.
// Whoever leads the chunk there (plan/hosts.h) pushes the sum to the chunk's server, and gives the result to the others
// (Poseidon §5.1, "Multi-GPU Settings"; Parameter Hub §3.4).
//
// A machine's parts are added in rank order, a rack's sums in the order of its machines, and a server's in the order of
// the racks. So the bits do not depend on the timing. Numbers travel as they are inside a rack. A narrower wire format
// begins at the leader that pushes, which also keeps what it rounds off.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "scheme/parameter_server.h"

namespace poseidon {

/// ps for a unit that goes by machine (ExchangeUnit::by_host). Only pushes go by machine. What else a worker asks of
/// the servers it asks itself, in the name of its rack.
class HostReduction final : public ParameterServer {
 public:
  explicit HostReduction(const SchemeTraits& traits) : ParameterServer(traits) {}
  void start(Exchange& exchange, const Links& links) const override;
  Result<std::span<std::byte>> accept(Exchange& exchange, const wire::Header& header, bool lent,
                                      const Links& links) const override;
  Status receive(Exchange& exchange, const wire::Header& header, std::span<const std::byte> payload,
                 const Links& links) const override;
  std::string waiting_for(const Exchange& exchange, const Links& links) const override;
  bool lacks(const Exchange& exchange, const Links& links, std::uint32_t peer) const override;
  bool lacks_part(const Exchange& exchange, const Links& links, std::uint32_t peer) const override;
  bool exchanges_with_server(const Exchange& exchange, const Links& links, const Chunk& chunk) const override;

  /// accept() and receive() for another worker's part of a chunk that this worker leads, or a machine's sum of it. The
  /// inbox may be that of the next step.
  static Result<std::span<std::byte>> make_room(HostInbox& inbox, const Exchange& exchange, const wire::Header& header,
                                                const Links& links);
  static void store(HostInbox& inbox, const wire::Header& header, std::span<const std::byte> payload,
                    const Links& links);

 private:
  wire::Envelope envelope_to_server(const Exchange& exchange, const Links& links) const override;
  void send_chunk(Exchange& exchange, const Links& links, const Chunk& chunk, wire::Header header) const override;
  bool confirms(const Exchange& exchange) const override;
  bool is_result(const Exchange& exchange, const wire::Header& header, const Links& links) const override;
  bool brings_values(const Exchange& exchange, std::uint32_t chunk) const override;
  bool stages(const Exchange& exchange, const wire::Header& answer) const override;
  std::span<const std::byte> keep_staged(Exchange& exchange, const Links& links, Buffer memory,
                                         std::span<const std::byte> values) const override;
  void pass_on(Exchange& exchange, const Links& links, const wire::Header& answer,
               std::span<const std::byte> values) const override;

  void push_if_whole(Exchange& exchange, const Links& links, const Chunk& chunk) const;
};

/// Returns the one HostReduction, which has static lifetime and no state.
const HostReduction& host_reduction();

}  // namespace poseidon
