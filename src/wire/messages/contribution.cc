#include "wire/messages/contribution.h"

namespace poseidon::wire {

namespace {

std::optional<std::uint64_t> limited_product(std::uint64_t a, std::uint64_t b, std::uint64_t c) {
  std::uint64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product) || __builtin_mul_overflow(product, c, &product) ||
      product > kMaxPayloadBytes)
    return std::nullopt;
  return product;
}

}  // namespace

std::optional<std::uint64_t> Contribution::factor_bytes() const {
  return limited_product(std::uint64_t{rows} + cols, factor_count, dtype_bytes(dtype));
}

std::optional<std::uint64_t> Contribution::matrix_bytes() const {
  return limited_product(rows, cols, dtype_bytes(dtype));
}

Contribution Contribution::read(const Header& header) {
  Contribution body;
  body.kind = header.kind;
  body.dtype = header.dtype;
  body.absent = (header.flags & kAbsent) != 0;
  body.dense = (header.flags & kDense) != 0;
  body.transient = (header.flags & kTransient) != 0;
  body.stored = (header.flags & kStored) != 0;
  body.wants_result = (header.flags & kNoResult) == 0;
  body.excluded_from_mean = (header.flags & kLate) != 0;
  body.divisor = header.divisor;
  body.factor_count = header.factor_count;
  body.rows = header.rows;
  body.cols = header.cols;
  return body;
}

Header Contribution::make(Header header) const {
  header.kind = kind;
  header.dtype = dtype;
  header.flags = static_cast<std::uint8_t>((absent ? kAbsent : 0) | (dense ? kDense : 0) |
                                           (transient ? kTransient : 0) | (stored ? kStored : 0) |
                                           (wants_result ? 0 : kNoResult) | (excluded_from_mean ? kLate : 0));
  header.divisor = divisor;
  header.factor_count = factor_count;
  header.rows = rows;
  header.cols = cols;
  return header;
}

StepResult StepResult::read(const Header& header) {
  StepResult body;
  body.dtype = header.dtype;
  body.absent = (header.flags & kAbsent) != 0;
  body.late = (header.flags & kLate) != 0;
  body.factor_count = header.factor_count;
  body.steps_since = header.rows;
  return body;
}

Header StepResult::make(Header header) const {
  header.kind = Kind::result;
  header.dtype = dtype;
  header.flags = static_cast<std::uint8_t>((absent ? kAbsent : 0) | (late ? kLate : 0));
  header.divisor = 1;
  header.factor_count = factor_count;
  header.rows = steps_since;
  header.cols = 0;
  return header;
}

}  // namespace poseidon::wire
