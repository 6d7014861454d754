// adam: Project Adam's strategy, kept as a baseline: factors go to the one shard that owns the
// matrix, which multiplies them and returns the dense gradient to all (Poseidon §3.2, Table 1).
#pragma once

#include "scheme/parameter_server.h"

namespace poseidon {

class Adam final : public ParameterServer {
 public:
  void start(Exchange& exchange, const Links& links) const override;
};

}  // namespace poseidon
