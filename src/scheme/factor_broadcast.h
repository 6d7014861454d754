// sfb: every worker sends its factors to every other worker, and every worker multiplies all of them itself (Poseidon
// §3.2).
#pragma once

#include "scheme/peer_broadcast.h"

namespace poseidon {

class FactorBroadcast final : public PeerBroadcast {
 public:
  FactorBroadcast();

 private:
  Pieces make_part(Exchange& exchange, const Links& links, Part& own, wire::Contribution& body) const override;
  std::optional<std::uint64_t> part_bytes(const Exchange& exchange, const wire::Contribution& body) const override;
  Status read_part(const Exchange& exchange, const wire::Contribution& body, Part& part) const override;
  void finish(Exchange& exchange, const Links& links) const override;
};

}  // namespace poseidon
