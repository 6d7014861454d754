#include "wire/kinds.h"

#include <string>

namespace poseidon::wire {

Status check_kind(Kind kind, Direction direction, std::uint64_t payload_bytes) {
  if (handling_of(kind, direction) == Handling::never)
    return {ErrorCode::mismatch, std::string("a ") + kind_name(kind) + " message has no place here"};
  if (payload_bytes > largest_payload(kind))
    return {ErrorCode::mismatch, concat("a ", kind_name(kind), " message has a payload of ", payload_bytes,
                                        " bytes, more than ", largest_payload(kind))};
  return {};
}

}  // namespace poseidon::wire
