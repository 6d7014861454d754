// The messages between a TcpStore and its server after the handshake. Integers are little-endian. A request has an op
// byte ('S' set, 'G' get), the key's length (u32), the value's length (u32), the key and the value. An answer has the
// value's length (u32) and the value (empty for 'S'), or one of the special lengths that mean "no value".
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "poseidon/status.h"

namespace poseidon::store_protocol {

// Not set by processes: the server has there who was not let in because it has another secret.
inline constexpr const char* kOtherSecretKey = "poseidon/other-secret";

inline constexpr char kSet = 'S';
inline constexpr char kGet = 'G';
inline constexpr std::size_t kRequestHeaderBytes = 9;
inline constexpr std::size_t kMaxKeyBytes = 4096;
inline constexpr std::size_t kMaxValueBytes = std::size_t{16} << 20;
inline constexpr std::uint32_t kNoSuchKey = 0xffffffffu;
inline constexpr std::uint32_t kFull = 0xfffffffeu;  // the server keeps no more

inline void append_u32(std::string& out, std::size_t value) {
  const auto narrow = static_cast<std::uint32_t>(value);
  out.append(reinterpret_cast<const char*>(&narrow), sizeof narrow);
}

inline std::uint32_t read_u32(const char* in) {
  std::uint32_t value;
  std::memcpy(&value, in, sizeof value);
  return value;
}

/// A request. Key and value point into the received bytes.
struct Request {
  char op = kGet;
  std::string_view key;
  std::string_view value;

  std::size_t size_bytes() const { return kRequestHeaderBytes + key.size() + value.size(); }
};

/// The bytes of a request. The caller has checked key and value against the limits.
std::string to_text(const Request& request);

/// The first request in the received bytes, or nullopt if it is not complete yet. ErrorCode::mismatch: the bytes cannot
/// become a request, because the op is unknown or a length is above its limit.
Result<std::optional<Request>> parse_request(std::string_view in);

}  // namespace poseidon::store_protocol
