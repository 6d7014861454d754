// What a TcpStore and its server say to each other after the handshake, little-endian: request = op byte ('S' set, 'G'
// get), key length u32, value length u32, key, value; answer = value length u32, value ('S': empty), or one of the
// lengths that stand for no value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "poseidon/status.h"

namespace poseidon::store_protocol {

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

/// A request as it lies in what has been received.
struct Request {
  char op = kGet;
  std::string_view key;
  std::string_view value;

  std::size_t size_bytes() const { return kRequestHeaderBytes + key.size() + value.size(); }
};

/// The text of a request; its key and value have been checked against the limits.
std::string to_text(const Request& request);

/// The first request of what a connection has sent so far; nullopt: it is not there as a whole. ErrorCode::mismatch as
/// soon as it cannot become one: an unknown op, or a length over its limit.
Result<std::optional<Request>> parse_request(std::string_view in);

}  // namespace poseidon::store_protocol
