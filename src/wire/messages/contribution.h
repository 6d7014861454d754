// The messages of a step: what a worker contributes (push, factors, rows, topk, onebit), and the
// step's answer (result).
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "poseidon/dtype.h"
#include "wire/header.h"

namespace poseidon::wire {

/// The factor count of a contribution that has no factors. Sums of factor counts saturate at it.
inline constexpr std::uint32_t kUnboundedFactors = 0xffffffffu;
/// What to do if rule digests differ.
inline constexpr const char* kSetSameRule = "call set_rule with the same rule on every rank before the same step";

/// A push, a local_push, a factors, a rows, a topk or an onebit message. It includes the envelope, because the server
/// keeps it for the whole step. The envelope has the rank of the sender, and the unit, chunk and step.
///
/// In a push of a machine's sum the rank is the number of ranks + that of the machine, and `worker_count` is the number
/// of machines.
///
/// Payload of a push: the chunk's gradient. Payload of a factors message: `factor_count` rows of `rows` output
/// gradients, then as many rows of `cols` inputs. Payload of a rows or a topk message: see RowList and TopK. With
/// `dense`, the payload of factors and rows is the rows × cols gradient. There is no payload if `absent`.
struct Contribution : Envelope {
  constexpr Contribution() { kind = Kind::push; }
  Contribution(Kind its_kind, const Envelope& about) : Envelope(about) { kind = its_kind; }

  DType dtype = DType::float32;
  bool absent = false;              // the sender has nothing to contribute in this step
  bool dense = false;               // factors, rows: the payload is the dense gradient
  bool transient = false;           // the server forgets the chunk when all workers have its result
  bool stored = false;              // the server keeps the chunk's value, which this push updates or replaces
  bool wants_result = true;         // false: the sender wants an answer without payload
  bool excluded_from_mean = false;  // stragglers=drop: the sender is behind, and the mean does not count this
  bool float32_value = false;       // stored, dtype narrower than float32: the server keeps its value in float32
  bool as_bfloat16 = false;         // stored, a value in float32: it comes back in bfloat16
  std::uint32_t worker_count = 0;   // P₁ as the sender knows it
  std::uint32_t divisor = 1;        // the sum over the workers is divided by it
  std::uint32_t factor_count = 0;   // K of the sender; kUnboundedFactors if it has a dense gradient
  std::uint32_t rows = 0;           // M of the gradient; 0: push, and gradients of another shape
  std::uint32_t cols = 0;           // N of the gradient; 0: as above
  std::uint64_t base = 0;           // push, stored: the digest of the value that the sender has; 0: it says none
  std::uint32_t rule_digest = 0;    // stored: of the rule that the sender has set (digest_of)

  bool has_factors() const { return kind == Kind::factors && !absent && !dense; }
  /// The types of the sum or value that the server keeps, and of what it sends back.
  DType value_dtype() const { return float32_value ? DType::float32 : dtype; }
  DType result_dtype() const { return as_bfloat16 ? DType::bfloat16 : value_dtype(); }
  /// Bytes that the payload of a push takes in value_dtype(). Blocks are whole.
  std::uint64_t value_bytes() const;
  /// Returns the bytes of a payload of factors, and of the matrix for which it stands. Empty if they are more than
  /// kMaxPayloadBytes.
  std::optional<std::uint64_t> factor_bytes() const;
  std::optional<std::uint64_t> matrix_bytes() const;

  /// `header` must be of kind push, local_push, factors, rows, topk or onebit.
  static Contribution read(const Header& header);
  Header make() const;

  bool operator==(const Contribution&) const = default;
};

/// The digest by which a worker and a server know that both have the same value. Never 0.
std::uint64_t base_digest(std::span<const std::byte> value);

/// result: answers a contribution. The header has the rank for which it is, and the unit, chunk, step and priority of
/// the contribution.
///
/// Payload: the reduced chunk, or the stored value after the step. `difference`: how that value differs from the one
/// whose digest the contribution had as its base (kernel::difference), in numbers of as many bytes. There is none if
/// nobody has contributed, or if the rank did not want the result. With stragglers=drop a stored value comes even if
/// nobody has contributed.
struct StepResult {
  DType dtype = DType::float32;
  bool absent = false;             // no worker has contributed
  bool difference = false;         // result of a stored value: from the contribution's base
  bool late = false;               // stragglers=drop: the step has ended without this rank's contribution
  std::uint32_t factor_count = 0;  // K summed over the workers
  std::uint32_t steps_since = 0;   // late: the number of later steps of the chunk that have ended

  /// `header` must be of kind result or local_result.
  static StepResult read(const Header& header);
  Header make(const Envelope& about, Kind kind = Kind::result) const;

  bool operator==(const StepResult&) const = default;
};

}  // namespace poseidon::wire
