// The messages about arrays that the servers keep: assign, pull, restore, value.
#pragma once

#include <cstdint>

#include "poseidon/dtype.h"
#include "wire/header.h"

namespace poseidon::wire {

/// An array that a server keeps for a chunk: 0 its value, 1 to 4 the states of the update rule, 5 the last mean
/// gradient.
using ArrayIndex = std::uint32_t;

/// assign: sets an array. It has no answer. Payload: the array's bytes.
struct Assign {
  DType dtype = DType::float32;
  ArrayIndex array = 0;
  std::uint64_t update_count = 0;  // the updates that the value has seen
  bool float32_value = false;      // dtype is bfloat16 or float16: the server keeps the array in float32

  /// `header` must be of kind assign.
  static Assign read(const Header& header);
  /// A message about `about`.
  Header make(const Envelope& about) const;

  bool operator==(const Assign&) const = default;
};

/// pull: asks for an array as it is now. If there is no value yet, the answer comes when there is one. No payload.
struct Pull {
  ArrayIndex array = 0;
  bool as_bfloat16 = false;   // a float32 array comes in bfloat16
  bool wants_payload = true;  // false: the answer only tells that what was sent before has been done

  static Pull read(const Header& header);
  Header make(const Envelope& about) const;

  bool operator==(const Pull&) const = default;
};

/// restore: gives the chunk what the server's newest checkpoint has, and returns the value at once. No payload.
struct Restore {
  DType dtype = DType::float32;
  std::uint64_t version_limit = 0;  // the newest version that may come; 0: any; 2⁶⁴ − 1: none
  bool as_bfloat16 = false;         // dtype is float32: the value comes in bfloat16

  static Restore read(const Header& header);
  Header make(const Envelope& about) const;

  bool operator==(const Restore&) const = default;
};

/// value: answers a pull or a restore. Header: as in the request. Payload: the array; none if `absent`.
struct Value {
  DType dtype = DType::float32;
  bool absent = false;  // restore: no checkpoint has the chunk
  ArrayIndex array = 0;
  std::uint64_t update_count = 0;  // the updates that the value has seen
  std::uint64_t version = 0;       // restore: of the checkpoint that the value comes from

  static Value read(const Header& header);
  Header make(const Envelope& about) const;

  bool operator==(const Value&) const = default;
};

}  // namespace poseidon::wire
