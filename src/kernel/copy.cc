#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernel/kernel.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace poseidon::kernel {

#if defined(__SSE2__)

namespace {
constexpr std::size_t kLineBytes = 64;  // of the caches
}

void copy_past_caches(std::span<const std::byte> in, std::byte* out) {
  const std::size_t to_line = (kLineBytes - reinterpret_cast<std::uintptr_t>(out) % kLineBytes) % kLineBytes;
  const std::size_t head_bytes = std::min(to_line, in.size());
  if (head_bytes > 0) std::memcpy(out, in.data(), head_bytes);
  std::size_t at = head_bytes;
  for (; at + kLineBytes <= in.size(); at += kLineBytes) {
    const auto* from = reinterpret_cast<const __m128i*>(in.data() + at);
    auto* to = reinterpret_cast<__m128i*>(out + at);
    const __m128i first = _mm_loadu_si128(from);
    const __m128i second = _mm_loadu_si128(from + 1);
    const __m128i third = _mm_loadu_si128(from + 2);
    const __m128i fourth = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, first);
    _mm_stream_si128(to + 1, second);
    _mm_stream_si128(to + 2, third);
    _mm_stream_si128(to + 3, fourth);
  }
  _mm_sfence();  // these stores are not in order with those that tell others of the array
  if (at < in.size()) std::memcpy(out + at, in.data() + at, in.size() - at);
}

#else

void copy_past_caches(std::span<const std::byte> in, std::byte* out) {
  if (!in.empty()) std::memcpy(out, in.data(), in.size());
}

#endif

}  // namespace poseidon::kernel
