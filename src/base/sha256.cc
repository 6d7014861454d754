#include "base/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/wipe.h"

namespace poseidon {

namespace {

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr std::array<std::uint32_t, 64> kRoundConstants{
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

constexpr std::size_t kHmacBlockBytes = 64;

std::uint32_t big_endian(const std::byte* in) {
  std::uint32_t word = 0;
  for (int i = 0; i < 4; ++i) word = word << 8 | std::to_integer<std::uint32_t>(in[i]);
  return word;
}

template <typename Word>
void put_big_endian(std::byte* out, Word word) {
  for (std::size_t i = sizeof(Word); i-- > 0; word = static_cast<Word>(word >> 8))
    out[i] = static_cast<std::byte>(word);
}

std::uint32_t small_sigma(std::uint32_t x, int a, int b, int shift) {
  return std::rotr(x, a) ^ std::rotr(x, b) ^ x >> shift;
}

std::uint32_t big_sigma(std::uint32_t x, int a, int b, int c) {
  return std::rotr(x, a) ^ std::rotr(x, b) ^ std::rotr(x, c);
}

}  // namespace

void Sha256::compress(std::span<const std::byte, kBlockBytes> block) {
  std::array<std::uint32_t, 64> w{};
  for (std::size_t i = 0; i < 16; ++i) w[i] = big_endian(block.data() + 4 * i);
  for (std::size_t i = 16; i < w.size(); ++i)
    w[i] = w[i - 16] + small_sigma(w[i - 15], 7, 18, 3) + w[i - 7] + small_sigma(w[i - 2], 17, 19, 10);
  auto [a, b, c, d, e, f, g, h] = state_;
  for (std::size_t i = 0; i < w.size(); ++i) {
    const std::uint32_t choice = (e & f) ^ (~e & g);
    const std::uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
    const std::uint32_t first = h + big_sigma(e, 6, 11, 25) + choice + kRoundConstants[i] + w[i];
    const std::uint32_t second = big_sigma(a, 2, 13, 22) + majority;
    h = g;
    g = f;
    f = e;
    e = d + first;
    d = c;
    c = b;
    b = a;
    a = first + second;
  }
  const std::array added{a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < state_.size(); ++i) state_[i] += added[i];
}

void Sha256::update(std::span<const std::byte> bytes) {
  one_thread_.check();
  std::size_t buffered = total_bytes_ % kBlockBytes;
  total_bytes_ += bytes.size();
  while (!bytes.empty()) {
    if (buffered == 0 && bytes.size() >= kBlockBytes) {
      compress(bytes.first<kBlockBytes>());
      bytes = bytes.subspan(kBlockBytes);
      continue;
    }
    const std::size_t count = std::min(bytes.size(), kBlockBytes - buffered);
    std::memcpy(block_.data() + buffered, bytes.data(), count);
    bytes = bytes.subspan(count);
    buffered += count;
    if (buffered < kBlockBytes) return;
    compress(block_);
    buffered = 0;
  }
}

Digest Sha256::finish() {
  one_thread_.check();
  // The padding is a 1 bit, zeros up to the block's last 8 bytes, and there the length in bits.
  std::array<std::byte, kBlockBytes> padding{std::byte{0x80}};
  std::array<std::byte, 8> length{};
  put_big_endian(length.data(), total_bytes_ * 8);
  const std::size_t buffered = total_bytes_ % kBlockBytes;
  const std::size_t zeros_end = buffered < kBlockBytes - length.size() ? kBlockBytes : 2 * kBlockBytes;
  update(std::span(padding).first(zeros_end - length.size() - buffered));
  update(length);
  Digest digest;
  for (std::size_t i = 0; i < state_.size(); ++i) put_big_endian(digest.data() + 4 * i, state_[i]);
  return digest;
}

Digest sha256(std::span<const std::byte> bytes) {
  Sha256 hash;
  hash.update(bytes);
  return hash.finish();
}

Digest hmac_sha256(std::span<const std::byte> key, std::initializer_list<std::span<const std::byte>> message) {
  std::array<std::byte, kHmacBlockBytes> inner_key{};
  if (key.size() > inner_key.size()) {
    const Digest shorter = sha256(key);
    std::ranges::copy(shorter, inner_key.begin());
  } else {
    std::ranges::copy(key, inner_key.begin());
  }
  auto outer_key = inner_key;
  for (std::byte& one : inner_key) one ^= std::byte{0x36};
  for (std::byte& one : outer_key) one ^= std::byte{0x5c};
  Sha256 inner;
  inner.update(inner_key);
  for (const auto& piece : message) inner.update(piece);
  const Digest inner_digest = inner.finish();
  Sha256 outer;
  outer.update(outer_key);
  outer.update(inner_digest);
  wipe(inner_key);
  wipe(outer_key);
  return outer.finish();
}

bool equal_in_constant_time(std::span<const std::byte> a, std::span<const std::byte> b) {
  if (a.size() != b.size()) return false;
  // It is volatile, so that the compiler cannot stop early.
  volatile std::uint8_t difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    difference = static_cast<std::uint8_t>(difference | std::to_integer<std::uint8_t>(a[i] ^ b[i]));
  return difference == 0;
}

}  // namespace poseidon
