#include "poseidon/collective.h"

namespace poseidon {

std::string_view reduce_op_name(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return "sum";
    case ReduceOp::product:
      return "product";
    case ReduceOp::min:
      return "min";
    case ReduceOp::max:
      return "max";
    case ReduceOp::band:
      return "band";
    case ReduceOp::bor:
      return "bor";
    case ReduceOp::bxor:
      return "bxor";
  }
  return "unknown";
}

std::string_view element_name(Element element) {
  switch (element) {
    case Element::int8:
      return "int8";
    case Element::int16:
      return "int16";
    default:
      return dtype_name(*dtype_of(element));
  }
}

std::size_t element_bytes(Element element) {
  switch (element) {
    case Element::int8:
      return 1;
    case Element::int16:
      return 2;
    default:
      return dtype_bytes(*dtype_of(element));
  }
}

std::optional<DType> dtype_of(Element element) {
  switch (element) {
    case Element::float32:
      return DType::float32;
    case Element::float64:
      return DType::float64;
    case Element::float16:
      return DType::float16;
    case Element::bfloat16:
      return DType::bfloat16;
    case Element::uint8:
      return DType::uint8;
    case Element::int32:
      return DType::int32;
    case Element::int64:
      return DType::int64;
    case Element::int8:
    case Element::int16:
      break;
  }
  return std::nullopt;
}

Status check_reduction(ReduceOp op, Element element, std::uint32_t divisor) {
  const auto dtype = dtype_of(element);
  const bool floating = dtype && dtype_is_floating(*dtype);
  const bool of_bits = op == ReduceOp::band || op == ReduceOp::bor || op == ReduceOp::bxor;
  if (of_bits && floating)
    return {ErrorCode::invalid_argument,
            concat("there is no ", reduce_op_name(op), " of ", element_name(element), "; give whole numbers")};
  if (divisor == 0 || (divisor != 1 && (op != ReduceOp::sum || !floating)))
    return {ErrorCode::invalid_argument,
            concat("a ", reduce_op_name(op), " of ", element_name(element), " is not divided by ", divisor,
                   "; give the divisor 1, except for a sum of floating-point numbers")};
  return {};
}

std::string_view collective_name(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::all_reduce:
      return "all_reduce";
    case CollectiveKind::reduce:
      return "reduce";
    case CollectiveKind::reduce_scatter:
      return "reduce_scatter";
    case CollectiveKind::all_gather:
      return "all_gather";
    case CollectiveKind::gather:
      return "gather";
    case CollectiveKind::broadcast:
      return "broadcast";
    case CollectiveKind::scatter:
      return "scatter";
    case CollectiveKind::all_to_all:
      return "all_to_all";
    case CollectiveKind::barrier:
      return "barrier";
  }
  return "unknown";
}

}  // namespace poseidon
