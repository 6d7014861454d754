#include "wire/messages/contribution.h"

#include <algorithm>

#include "poseidon/digest.h"
#include "wire/body.h"

namespace poseidon::wire {

namespace {

std::optional<std::uint64_t> limited_product(std::uint64_t a, std::uint64_t b, std::uint64_t c) {
  std::uint64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product) || __builtin_mul_overflow(product, c, &product) ||
      product > kMaxPayloadBytes)
    return std::nullopt;
  return product;
}

constexpr auto kFirstFields = [](auto& body, auto& message) {
  body.dtype(message.dtype);
  body.flag(1, message.absent);
  body.flag(4, message.transient);
  body.flag(8, message.stored);
  body.flag_unless(16, message.wants_result);
  body.flag(32, message.excluded_from_mean);
  body.flag(64, message.float32_value);
  body.flag(128, message.as_bfloat16);
  body.number(message.worker_count);
  body.number(message.divisor);
  body.number(message.factor_count);
};

constexpr auto kPushFields = [](auto& body, auto& message) {
  kFirstFields(body, message);
  body.number(message.base);
  body.number(message.rule_digest);
};

constexpr auto kMatrixFields = [](auto& body, auto& message) {
  kFirstFields(body, message);
  body.number(message.rows);
  body.number(message.cols);
  body.number(message.rule_digest);
};

constexpr auto kFactorsFields = [](auto& body, auto& message) {
  kMatrixFields(body, message);
  body.flag(2, message.dense);
};

constexpr auto kLocalResultFields = [](auto& body, auto& message) {
  body.dtype(message.dtype);
  body.flag(1, message.absent);
  body.flag(2, message.late);
  body.number(message.factor_count);
  body.number(message.steps_since);
};

constexpr auto kResultFields = [](auto& body, auto& message) {
  kLocalResultFields(body, message);
  body.flag(4, message.difference);
};

}  // namespace

constinit const BodyShape BodyShapes::push = shape_of<Contribution>(kPushFields);
constinit const BodyShape BodyShapes::factors = shape_of<Contribution>(kFactorsFields);
constinit const BodyShape BodyShapes::rows = shape_of<Contribution>(kFactorsFields);
constinit const BodyShape BodyShapes::topk = shape_of<Contribution>(kMatrixFields);
constinit const BodyShape BodyShapes::onebit = shape_of<Contribution>(kMatrixFields);
constinit const BodyShape BodyShapes::local_push = shape_of<Contribution>(kMatrixFields);
constinit const BodyShape BodyShapes::result = shape_of<StepResult>(kResultFields);
constinit const BodyShape BodyShapes::local_result = shape_of<StepResult>(kLocalResultFields);

std::uint64_t Contribution::value_bytes() const {
  return float32_value ? payload_bytes / dtype_bytes(dtype) * dtype_values(dtype) * sizeof(float) : payload_bytes;
}

std::optional<std::uint64_t> Contribution::factor_bytes() const {
  return limited_product(std::uint64_t{rows} + cols, factor_count, dtype_bytes(dtype));
}

std::optional<std::uint64_t> Contribution::matrix_bytes() const {
  return limited_product(rows, cols, dtype_bytes(dtype));
}

Contribution Contribution::read(const Header& header) {
  Contribution contribution(header.kind, header);
  BodyReader body(header);
  if (header.kind == Kind::push)
    kPushFields(body, contribution);
  else
    kFactorsFields(body, contribution);
  return contribution;
}

Header Contribution::make() const {
  return kind == Kind::push ? make_header(*this, kind, *this, kPushFields)
                            : make_header(*this, kind, *this, kFactorsFields);
}

std::uint64_t base_digest(std::span<const std::byte> value) { return std::max<std::uint64_t>(1, digest(value)); }

StepResult StepResult::read(const Header& header) { return read_body<StepResult>(header, kResultFields); }

Header StepResult::make(const Envelope& about, Kind kind) const {
  return make_header(about, kind, *this, kResultFields);
}

}  // namespace poseidon::wire
