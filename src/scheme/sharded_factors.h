// sharded_factors: the workers send factors to the servers. Each server multiplies one block of the layer's matrix, in
// rank order, and sends it to all workers (docs/decisions/0026-sharded-factors.md).
#pragma once

#include "scheme/parameter_server.h"

namespace poseidon {

/// The messages are of kind factors, one for each of Unit::blocks. A worker whose gradient is dense in some step sends
/// the blocks of its gradient, and one without a gradient says so for each block. The messages of all workers have the
/// type Unit::factor_dtype, and so have the results.
class ShardedFactors : public ParameterServer {
 public:
  using ParameterServer::ParameterServer;
  void start(Exchange& exchange, const Links& links) const override;
  Result<std::span<std::byte>> accept(Exchange& exchange, const wire::Header& header, bool lent,
                                      const Links& links) const override;
  Status receive(Exchange& exchange, const wire::Header& header, std::span<const std::byte> payload,
                 const Links& links) const override;
};

}  // namespace poseidon
