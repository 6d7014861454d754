#include "kernel/bit_planes.h"

#include <bit>
#include <cstring>

#include "base/invariant.h"

#if POSEIDON_X86_DISPATCH
#include <immintrin.h>
#elif POSEIDON_NEON
#include <arm_neon.h>
#endif

namespace poseidon::kernel {
namespace {

constexpr std::size_t kValues = 8 * kPlaneBytes;
constexpr std::size_t kMostChosenBytes = 32 * kPlaneBytes;
constexpr std::uint64_t kLowestBits = 0x0101010101010101;

void pack_portable(const std::uint8_t* in, std::size_t plane_count, std::byte* out) {
  for (std::size_t i = 0; i < kValues; i += 8) {
    std::uint64_t eight = 0;
    std::memcpy(&eight, in + i, sizeof eight);
    for (std::size_t plane = 0; plane < plane_count; ++plane) {
      // The product has the lowest bit of byte i at bit 56 + i.
      const std::uint64_t gathered = ((eight >> plane & kLowestBits) * 0x0102040810204080) >> 56;
      out[plane * kPlaneBytes + i / 8] = static_cast<std::byte>(gathered);
    }
  }
}

void unpack_portable(const std::byte* in, std::size_t plane_count, std::uint8_t* out) {
  for (std::size_t i = 0; i < kValues; i += 8) {
    std::uint64_t eight = 0;
    for (std::size_t plane = 0; plane < plane_count; ++plane) {
      const auto bits = std::to_integer<std::uint64_t>(in[plane * kPlaneBytes + i / 8]);
      const std::uint64_t spread = bits * kLowestBits & 0x8040201008040201;  // bit i is in byte i
      eight |= ((spread + 0x7f7f7f7f7f7f7f7f) >> 7 & kLowestBits) << plane;
    }
    std::memcpy(out + i, &eight, sizeof eight);
  }
}

/// Moves the bits of `word` that are set in `mask` to the lowest places.
std::uint64_t gathered(std::uint64_t word, std::uint64_t mask) {
  std::uint64_t out = 0;
  for (unsigned to = 0; mask != 0; mask &= mask - 1, ++to) out |= (word >> std::countr_zero(mask) & 1) << to;
  return out;
}

/// The opposite.
std::uint64_t scattered(std::uint64_t bits, std::uint64_t mask) {
  std::uint64_t out = 0;
  for (; mask != 0; mask &= mask - 1, bits >>= 1) out |= (bits & 1) << std::countr_zero(mask);
  return out;
}

template <typename Gather>
POSEIDON_INLINE std::size_t pack_chosen_with(const Gather& gather, std::span<const PlaneWords> planes,
                                             std::span<const PlaneWords> masks, std::byte* out) {
  const std::byte* const begin = out;
  std::uint64_t waiting = 0;
  unsigned waiting_bits = 0;
  for (std::size_t plane = 0; plane < masks.size(); ++plane) {
    for (std::size_t i = 0; i < masks[plane].size(); ++i) {
      const std::uint64_t mask = masks[plane][i];
      const std::uint64_t bits = gather(planes[plane][i], mask);
      const auto count = static_cast<unsigned>(std::popcount(mask));
      waiting |= bits << waiting_bits;
      if (waiting_bits + count >= 64) {
        std::memcpy(out, &waiting, sizeof waiting);
        out += sizeof waiting;
        waiting = waiting_bits == 0 ? 0 : bits >> (64 - waiting_bits);
      }
      waiting_bits = (waiting_bits + count) % 64;
    }
  }
  std::memcpy(out, &waiting, sizeof waiting);
  return static_cast<std::size_t>(out - begin) + (waiting_bits + 7) / 8;
}

template <typename Scatter>
POSEIDON_INLINE void unpack_chosen_with(const Scatter& scatter, std::span<const std::byte> in,
                                        std::span<const PlaneWords> masks, std::span<PlaneWords> planes) {
  invariant(in.size() <= kMostChosenBytes && masks.size() == planes.size(), "chosen bits are those of a few planes");
  // With room behind, so that words can be read anywhere.
  std::array<std::byte, kMostChosenBytes + 2 * sizeof(std::uint64_t)> padded;
  std::memcpy(padded.data(), in.data(), in.size());
  std::memset(padded.data() + in.size(), 0, 2 * sizeof(std::uint64_t));
  const auto word_at = [&](std::size_t byte) {
    std::uint64_t word = 0;
    std::memcpy(&word, padded.data() + byte, sizeof word);
    return word;
  };
  std::size_t at_bit = 0;
  for (std::size_t plane = 0; plane < masks.size(); ++plane) {
    for (std::size_t i = 0; i < masks[plane].size(); ++i) {
      const std::uint64_t mask = masks[plane][i];
      const std::size_t shift = at_bit % 8;
      std::uint64_t bits = word_at(at_bit / 8) >> shift;
      if (shift > 0) bits |= word_at(at_bit / 8 + 8) << (64 - shift);
      planes[plane][i] = scatter(bits, mask);
      at_bit += static_cast<std::size_t>(std::popcount(mask));
    }
  }
}

#if POSEIDON_X86_DISPATCH
__attribute__((POSEIDON_TARGET_V3)) std::size_t pack_chosen_v3(std::span<const PlaneWords> planes,
                                                               std::span<const PlaneWords> masks, std::byte* out) {
  return pack_chosen_with(
      [](std::uint64_t word, std::uint64_t mask) __attribute__((POSEIDON_TARGET_V3)) { return _pext_u64(word, mask); },
      planes, masks, out);
}

__attribute__((POSEIDON_TARGET_V3)) void unpack_chosen_v3(std::span<const std::byte> in,
                                                          std::span<const PlaneWords> masks,
                                                          std::span<PlaneWords> planes) {
  unpack_chosen_with(
      [](std::uint64_t bits, std::uint64_t mask) __attribute__((POSEIDON_TARGET_V3)) { return _pdep_u64(bits, mask); },
      in, masks, planes);
}

__attribute__((target("avx2"))) void pack_v3(const std::uint8_t* in, std::size_t plane_count, std::byte* out) {
  for (std::size_t i = 0; i < kValues; i += 32) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i));
    for (std::size_t plane = 0; plane < plane_count; ++plane) {
      const __m128i up = _mm_cvtsi32_si128(7 - static_cast<int>(plane));
      const int bits = _mm256_movemask_epi8(_mm256_sll_epi16(bytes, up));
      std::memcpy(out + plane * kPlaneBytes + i / 8, &bits, sizeof bits);
    }
  }
}

__attribute__((target("avx2"))) void unpack_v3(const std::byte* in, std::size_t plane_count, std::uint8_t* out) {
  const __m256i byte_of = _mm256_setr_epi64x(0, kLowestBits, 2 * kLowestBits, 3 * kLowestBits);
  const __m256i bit_of = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
  for (std::size_t i = 0; i < kValues; i += 32) {
    __m256i bytes = _mm256_setzero_si256();
    for (std::size_t plane = 0; plane < plane_count; ++plane) {
      int bits = 0;
      std::memcpy(&bits, in + plane * kPlaneBytes + i / 8, sizeof bits);
      const __m256i spread = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(bits), byte_of), bit_of);
      const __m256i is_set = _mm256_cmpeq_epi8(spread, bit_of);
      bytes = _mm256_or_si256(bytes, _mm256_and_si256(is_set, _mm256_set1_epi8(static_cast<char>(1u << plane))));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), bytes);
  }
}

__attribute__((POSEIDON_TARGET_V4)) void pack_v4(const std::uint8_t* in, std::size_t plane_count, std::byte* out) {
  for (std::size_t i = 0; i < kValues; i += 64) {
    const __m512i bytes = _mm512_loadu_si512(in + i);
    for (std::size_t plane = 0; plane < plane_count; ++plane) {
      const std::uint64_t bits = _mm512_test_epi8_mask(bytes, _mm512_set1_epi8(static_cast<char>(1u << plane)));
      std::memcpy(out + plane * kPlaneBytes + i / 8, &bits, sizeof bits);
    }
  }
}

__attribute__((POSEIDON_TARGET_V4)) void unpack_v4(const std::byte* in, std::size_t plane_count, std::uint8_t* out) {
  for (std::size_t i = 0; i < kValues; i += 64) {
    __m512i bytes = _mm512_setzero_si512();
    for (std::size_t plane = 0; plane < plane_count; ++plane) {
      std::uint64_t bits = 0;
      std::memcpy(&bits, in + plane * kPlaneBytes + i / 8, sizeof bits);
      bytes = _mm512_or_si512(bytes, _mm512_maskz_set1_epi8(bits, static_cast<char>(1u << plane)));
    }
    _mm512_storeu_si512(out + i, bytes);
  }
}
#elif POSEIDON_NEON
/// Bit i of a byte in lane i, twice.
POSEIDON_INLINE uint8x16_t lane_bits() { return vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201)); }

void pack_neon(const std::uint8_t* in, std::size_t plane_count, std::byte* out) {
  for (std::size_t i = 0; i < kValues; i += 64) {
    const uint8x16x4_t bytes = {vld1q_u8(in + i), vld1q_u8(in + i + 16), vld1q_u8(in + i + 32), vld1q_u8(in + i + 48)};
    for (std::size_t plane = 0; plane < plane_count; ++plane) {
      const uint8x16_t bit = vdupq_n_u8(static_cast<std::uint8_t>(1u << plane));
      const auto chosen = [&](int k) { return vandq_u8(vtstq_u8(bytes.val[k], bit), lane_bits()); };
      // Each addition of neighbours halves the lanes of a byte of the result: 8, 4, 2, 1.
      const uint8x16_t pairs = vpaddq_u8(vpaddq_u8(chosen(0), chosen(1)), vpaddq_u8(chosen(2), chosen(3)));
      const uint8x16_t eight = vpaddq_u8(pairs, pairs);
      vst1_u8(reinterpret_cast<std::uint8_t*>(out + plane * kPlaneBytes + i / 8), vget_low_u8(eight));
    }
  }
}

void unpack_neon(const std::byte* in, std::size_t plane_count, std::uint8_t* out) {
  const uint8x16_t byte_of = vcombine_u8(vdup_n_u8(0), vdup_n_u8(1));
  for (std::size_t i = 0; i < kValues; i += 16) {
    uint8x16_t bytes = vdupq_n_u8(0);
    for (std::size_t plane = 0; plane < plane_count; ++plane) {
      std::uint16_t bits = 0;
      std::memcpy(&bits, in + plane * kPlaneBytes + i / 8, sizeof bits);
      const uint8x16_t spread = vqtbl1q_u8(vreinterpretq_u8_u16(vdupq_n_u16(bits)), byte_of);
      const uint8x16_t value = vdupq_n_u8(static_cast<std::uint8_t>(1u << plane));
      bytes = vorrq_u8(bytes, vandq_u8(vtstq_u8(spread, lane_bits()), value));
    }
    vst1q_u8(out + i, bytes);
  }
}
#endif

}  // namespace

void pack_planes(Isa isa, const std::uint8_t* in, std::size_t plane_count, std::byte* out) {
#if POSEIDON_X86_DISPATCH
  if (isa == Isa::v4) return pack_v4(in, plane_count, out);
  if (isa == Isa::v3) return pack_v3(in, plane_count, out);
#elif POSEIDON_NEON
  if (isa == Isa::neon) return pack_neon(in, plane_count, out);
#endif
  static_cast<void>(isa);
  pack_portable(in, plane_count, out);
}

void unpack_planes(Isa isa, const std::byte* in, std::size_t plane_count, std::uint8_t* out) {
#if POSEIDON_X86_DISPATCH
  if (isa == Isa::v4) return unpack_v4(in, plane_count, out);
  if (isa == Isa::v3) return unpack_v3(in, plane_count, out);
#elif POSEIDON_NEON
  if (isa == Isa::neon) return unpack_neon(in, plane_count, out);
#endif
  static_cast<void>(isa);
  unpack_portable(in, plane_count, out);
}

std::size_t pack_chosen(Isa isa, std::span<const PlaneWords> planes, std::span<const PlaneWords> masks,
                        std::byte* out) {
#if POSEIDON_X86_DISPATCH
  if (isa != Isa::baseline) return pack_chosen_v3(planes, masks, out);
#endif
  static_cast<void>(isa);
  return pack_chosen_with(gathered, planes, masks, out);
}

void unpack_chosen(Isa isa, std::span<const std::byte> in, std::span<const PlaneWords> masks,
                   std::span<PlaneWords> planes) {
#if POSEIDON_X86_DISPATCH
  if (isa != Isa::baseline) return unpack_chosen_v3(in, masks, planes);
#endif
  static_cast<void>(isa);
  unpack_chosen_with(scattered, in, masks, planes);
}

}  // namespace poseidon::kernel
