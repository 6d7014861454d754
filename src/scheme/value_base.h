// The value that this worker has of a chunk, from which its server may send the difference instead of the whole new
// one.
#pragma once

#include <span>

#include "scheme/scheme.h"

namespace poseidon {

/// Says in `push`, to the server of its chunk, which value lies where the result goes, if the answer may be the
/// difference from that. If something else is there when it comes, take_difference says so.
void name_base(Exchange& exchange, const Links& links, wire::Contribution& push);

/// Whether an answer is a difference.
bool is_difference(const wire::Header& answer);
/// Whether this worker has named a base for the answer, which brings something.
bool has_base(const Exchange& exchange, const wire::Header& answer);

/// Makes the value of its difference, where the base lies. Returns false, and writes nothing, if something else is
/// there by now than at the push: then only the whole value is right. `difference` is overwritten.
bool take_difference(const Exchange& exchange, const wire::Header& answer, std::span<std::byte> difference);

}  // namespace poseidon
