#include "poseidon/status.h"

#include <array>

#include "poseidon/dtype.h"

namespace poseidon {

namespace {

template <std::size_t Count>
std::string_view name_at(const std::array<std::string_view, Count>& names, std::size_t index) {
  return index < Count ? names[index] : "unknown";
}

}  // namespace

std::string_view error_code_name(ErrorCode code) {
  constexpr std::array<std::string_view, 10> names{"ok",      "invalid_argument", "timeout", "peer_lost", "mismatch",
                                                   "refused", "unreachable",      "aborted", "shut_down", "evicted"};
  static_assert(names.size() == static_cast<std::size_t>(ErrorCode::evicted) + 1);
  return name_at(names, static_cast<std::size_t>(code));
}

std::string_view dtype_name(DType dtype) {
  constexpr std::array<std::string_view, 9> names{"unknown", "float32", "float64", "float16",    "bfloat16",
                                                  "uint8",   "int32",   "int64",   "int8_blocks"};
  static_assert(names.size() == static_cast<std::size_t>(DType::int8_blocks) + 1);
  return name_at(names, static_cast<std::size_t>(dtype));
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
