// The value that this worker has of a chunk, from which its server may send the difference instead of the whole new
// one.
#pragma once

#include <span>

#include "scheme/scheme.h"

namespace poseidon {

/// Says in `push`, to the server of its chunk, which value lies where the result goes, if the answer may be the
/// difference from that. The value has to stay there until the answer comes.
void name_base(Exchange& exchange, const Links& links, wire::Contribution& push);

/// Whether an answer is a difference.
bool is_difference(const wire::Header& answer);
/// ErrorCode::mismatch: the answer is a difference, and this worker has named no base.
Status check_difference(const Exchange& exchange, const wire::Header& answer);

/// Makes the value of its difference, where the base lies. ErrorCode::mismatch: something has been written there since
/// the push.
Status take_difference(const Exchange& exchange, const wire::Header& answer, std::span<const std::byte> difference);

}  // namespace poseidon
