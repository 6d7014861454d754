#include "poseidon/status.h"

#include "poseidon/dtype.h"

namespace poseidon {

std::string_view error_code_name(ErrorCode code) {
  switch (code) {
    case ErrorCode::ok:
      return "ok";
    case ErrorCode::invalid_argument:
      return "invalid_argument";
    case ErrorCode::timeout:
      return "timeout";
    case ErrorCode::peer_lost:
      return "peer_lost";
    case ErrorCode::mismatch:
      return "mismatch";
    case ErrorCode::refused:
      return "refused";
    case ErrorCode::unreachable:
      return "unreachable";
    case ErrorCode::aborted:
      return "aborted";
    case ErrorCode::shut_down:
      return "shut_down";
    case ErrorCode::evicted:
      return "evicted";
  }
  return "unknown";
}

std::string_view dtype_name(DType dtype) {
  switch (dtype) {
    case DType::float32:
      return "float32";
    case DType::float64:
      return "float64";
    case DType::float16:
      return "float16";
    case DType::bfloat16:
      return "bfloat16";
    case DType::uint8:
      return "uint8";
    case DType::int32:
      return "int32";
    case DType::int64:
      return "int64";
    case DType::int8_blocks:
      return "int8_blocks";
  }
  return "unknown";
}

const std::string& Status::message() const {
  static const std::string empty;
  return state_ ? state_->message : empty;
}

Status Status::with_context(std::string_view context) const {
  if (ok()) return *this;
  return {code(), std::string(context) + ": " + message()};
}

}  // namespace poseidon
