// Status and Result: how every operation of the library says that it failed.
//
// Operations cross threads, so errors are values; exceptions appear only at the Python edge
// (`docs/errors.md`). A Status is cheap to copy when ok and immutable afterwards.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace poseidon {

/// What kind of failure it was. Python raises one `PoseidonError` subclass per code.
enum class ErrorCode : unsigned char {
  ok = 0,
  invalid_argument,  // the caller passed something that cannot work; nothing was sent
  timeout,           // a deadline passed; the message names who was waited for
  peer_lost,         // a connection ended while something was still expected from it
  mismatch,          // ranks disagree (model, dtype, version, options)
  refused,           // a server refused a request of this worker alone, or the peer does not know the secret
  unreachable,       // connecting failed, or an address cannot be bound
  aborted,           // another rank failed first and said why
  shut_down,         // the operation came after shutdown()
  evicted,           // the operator of a server has ended the job there
};

/// The name used in messages and in Python, e.g. "peer_lost".
std::string_view error_code_name(ErrorCode code);

/// Success, or a code and a message for people. Thread-safe: immutable once built.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(ErrorCode code, std::string message)
      : state_(std::make_shared<const State>(State{code, std::move(message)})) {}

  /// Whether the operation succeeded, the kind of error, and its message (empty when ok).
  bool ok() const { return state_ == nullptr; }
  ErrorCode code() const { return state_ ? state_->code : ErrorCode::ok; }
  const std::string& message() const;

  /// The same error with `context` put before its message ("context: message"). Ok stays ok.
  Status with_context(std::string_view context) const;

 private:
  struct State {
    ErrorCode code;
    std::string message;
  };
  std::shared_ptr<const State> state_;
};

/// A value or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {}  // NOLINT(google-explicit-constructor)

  /// `value` may be called only when ok; `status` is ok then, too.
  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& value() { return *value_; }
  const T& value() const { return *value_; }

 private:
  std::optional<T> value_;
  Status status_;
};

/// Texts and numbers one after the other, the numbers as std::to_string writes them.
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::string text;
  const auto append = [&text](const auto& part) {
    using Part = std::remove_cvref_t<decltype(part)>;
    if constexpr (std::is_arithmetic_v<Part> && !std::is_same_v<Part, char>) {
      text += std::to_string(part);
    } else {
      text += part;
    }
  };
  (append(parts), ...);
  return text;
}

}  // namespace poseidon
