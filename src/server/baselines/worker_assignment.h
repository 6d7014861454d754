// assignment=worker, the baseline of Parameter Hub §4.5: a core receives whatever its workers push. It hands chunks
// that other cores own to them, and their results come back through it.
#pragma once

#include <memory>
#include <vector>

#include "server/core/server_core.h"

namespace poseidon {

/// Gives each core of a server its side of the handover. Call it before the first core listens. It does nothing for a
/// single core. The cores' loops must stop before the first core is destroyed.
void assign_by_worker(const std::vector<std::unique_ptr<ServerCore>>& cores);

}  // namespace poseidon
