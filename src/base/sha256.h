// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string_view>

#include "base/one_thread.h"

namespace poseidon {

inline constexpr std::size_t kDigestBytes = 32;
using Digest = std::array<std::byte, kDigestBytes>;

/// Computes one digest: call `update` any number of times, then `finish` once. Not thread-safe.
class Sha256 {
 public:
  void update(std::span<const std::byte> bytes);
  Digest finish();

 private:
  static constexpr std::size_t kBlockBytes = 64;

  void compress(std::span<const std::byte, kBlockBytes> block);

  std::array<std::uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::byte, kBlockBytes> block_{};  // the bytes since the last whole block
  std::uint64_t total_bytes_ = 0;
  [[no_unique_address]] OneThread one_thread_{"Sha256"};
};

Digest sha256(std::span<const std::byte> bytes);

/// The HMAC of the pieces of `message`, one after the other. The key may have any length.
Digest hmac_sha256(std::span<const std::byte> key, std::initializer_list<std::span<const std::byte>> message);

/// Compares in a time that does not depend on where the two differ. False for different sizes.
bool equal_in_constant_time(std::span<const std::byte> a, std::span<const std::byte> b);

/// The bytes of a text.
inline std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

}  // namespace poseidon
