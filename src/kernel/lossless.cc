#include "kernel/lossless.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/invariant.h"
#include "kernel/lossless_floats.h"
#include "kernel/lossless_integers.h"

namespace poseidon::kernel {
namespace {

constexpr std::uint8_t kZeroBlocks = 0x00;  // then how many, less one
constexpr std::uint8_t kZeroBlock = 0x01;
constexpr std::uint8_t kPlainBlock = 0x02;
constexpr std::size_t kMostZeroBlocks = 256;

/// How many bytes say that so many blocks are zeros.
constexpr std::size_t zeros_bytes(std::size_t block_count) {
  return 2 * (block_count / kMostZeroBlocks) + std::min<std::size_t>(block_count % kMostZeroBlocks, 2);
}

void write_zeros(std::size_t block_count, std::byte* out) {
  while (block_count > 1) {
    const std::size_t now = std::min(block_count, kMostZeroBlocks);
    *out++ = std::byte{kZeroBlocks};
    *out++ = static_cast<std::byte>(now - 1);
    block_count -= now;
  }
  if (block_count == 1) *out = std::byte{kZeroBlock};
}

template <typename Block>
POSEIDON_INLINE std::size_t encode_values(Isa isa, const std::byte* values, std::size_t value_count, std::byte* out) {
  constexpr std::size_t kPlainBytes = kBlockValues * sizeof(typename Block::Value);
  const std::byte* const begin = out;
  std::size_t zero_blocks = 0;
  const auto end_zeros = [&]() __attribute__((always_inline)) {
    write_zeros(zero_blocks, out);
    out += zeros_bytes(std::exchange(zero_blocks, 0));
  };
  for (std::size_t blocks = value_count / kBlockValues; blocks > 0; --blocks, values += kPlainBytes) {
    bool zeros = false;
    std::byte* const place = out + zeros_bytes(zero_blocks);
    const std::size_t block_bytes = Block::encode(isa, values, place, zeros);
    if (zeros) {
      ++zero_blocks;
      continue;
    }
    end_zeros();
    if (block_bytes > 0) {
      out += block_bytes;
      continue;
    }
    *out++ = std::byte{kPlainBlock};
    std::memcpy(out, values, kPlainBytes);
    out += kPlainBytes;
  }
  end_zeros();
  const std::size_t rest_bytes = value_count % kBlockValues * sizeof(typename Block::Value);
  if (rest_bytes > 0) std::memcpy(out, values, rest_bytes);
  return static_cast<std::size_t>(out - begin) + rest_bytes;
}

/// What a call of decode_lossless has used and made so far.
template <typename Block>
class Decoding {
 public:
  Decoding(std::span<const std::byte> coded, std::byte* values, std::size_t value_count)
      : coded_(coded), values_(values), left_(value_count) {}

  POSEIDON_INLINE Decoded run(Isa isa) {
    while (left_ >= kBlockValues && step(isa)) {
    }
    const std::size_t rest_bytes = left_ * kValueBytes;
    if (left_ > 0 && left_ < kBlockValues && rest_bytes <= coded_.size() - done_.coded_bytes) {
      std::memcpy(values_, coded_.data() + done_.coded_bytes, rest_bytes);
      advance(rest_bytes, left_);
    }
    return done_;
  }

 private:
  static constexpr std::size_t kValueBytes = sizeof(typename Block::Value);
  static constexpr std::size_t kPlainBytes = kBlockValues * kValueBytes;

  /// Decodes what comes next, and returns whether it could.
  POSEIDON_INLINE bool step(Isa isa) {
    const auto coded = coded_.subspan(done_.coded_bytes);
    if (coded.empty()) return false;
    switch (const std::uint8_t first = byte_at(coded.data()); first) {
      case kZeroBlocks:
        return coded.size() >= 2 && zeros(2, std::size_t{byte_at(coded.data() + 1)} + 1);
      case kZeroBlock:
        return zeros(1, 1);
      case kPlainBlock:
        if (coded.size() < 1 + kPlainBytes) return false;
        std::memcpy(values_, coded.data() + 1, kPlainBytes);
        return advance(1 + kPlainBytes, kBlockValues);
      default:
        if (first < kCodedBlock) return malformed();
        return block(isa, coded);
    }
  }

  POSEIDON_INLINE bool block(Isa isa, std::span<const std::byte> coded) {
    if (coded.size() < Block::kHeadBytes) return false;
    const typename Block::Head head(coded.data());
    if (!head.valid()) return malformed();
    if (coded.size() < head.block_bytes()) return false;
    if (!Block::decode(isa, coded.data(), head, values_)) return malformed();
    return advance(head.block_bytes(), kBlockValues);
  }

  bool zeros(std::size_t coded_bytes, std::size_t block_count) {
    if (block_count > left_ / kBlockValues) return malformed();
    std::memset(values_, 0, block_count * kPlainBytes);
    return advance(coded_bytes, block_count * kBlockValues);
  }

  bool advance(std::size_t coded_bytes, std::size_t value_count) {
    done_.coded_bytes += coded_bytes;
    done_.value_count += value_count;
    values_ += value_count * kValueBytes;
    left_ -= value_count;
    return true;
  }

  bool malformed() {
    done_.malformed = true;
    return false;
  }

  std::span<const std::byte> coded_;
  std::byte* values_;
  std::size_t left_;
  Decoded done_;
};

/// Calls `body` with the block type of a coding.
template <typename Body>
POSEIDON_INLINE auto with_block(Coding coding, const Body& body) {
  switch (coding) {
    case Coding::float16:
      return body.template operator()<FloatBlock<std::uint16_t, 5, 10>>();
    case Coding::bfloat16:
      return body.template operator()<FloatBlock<std::uint16_t, 8, 7>>();
    case Coding::difference32:
      return body.template operator()<IntegerBlock<std::uint32_t>>();
    case Coding::difference16:
      return body.template operator()<IntegerBlock<std::uint16_t>>();
    case Coding::int8:
      return body.template operator()<SignedByteBlock>();
    case Coding::float32:
      break;
    case Coding::none:
      invariant(false, "values of a known kind are coded");
  }
  return body.template operator()<FloatBlock<std::uint32_t, 8, 23>>();
}

/// out[i] = combine(a[i], b[i]), in words. The arrays are the same or do not overlap.
template <typename Word, typename Combine>
POSEIDON_INLINE void each(const std::byte* a, const std::byte* b, std::byte* out, std::size_t count,
                          const Combine& combine) {
  const auto* const left = reinterpret_cast<const Word*>(a);
  const auto* const right = reinterpret_cast<const Word*>(b);
  auto* const result = reinterpret_cast<Word*>(out);
  POSEIDON_INDEPENDENT_ELEMENTS
  for (std::size_t i = 0; i < count; ++i) result[i] = combine(left[i], right[i]);
}

template <typename Word>
void difference_of(const std::byte* values, const std::byte* base, std::byte* out, std::size_t count) {
  run_with(
      best_isa(), [=](auto) __attribute__((always_inline)) {
        each<Word>(
            values, base, out, count,
            [](Word value, Word from) __attribute__((always_inline)) { return fold(static_cast<Word>(value - from)); });
      });
}

template <typename Word>
void add_difference_of(const std::byte* differences, const std::byte* base, std::byte* values, std::size_t count) {
  run_with(
      best_isa(), [=](auto) __attribute__((always_inline)) {
        each<Word>(
            differences, base, values, count, [](Word folded, Word from) __attribute__((always_inline)) {
              return static_cast<Word>(from + unfold(folded));
            });
      });
}

}  // namespace

std::size_t encode_lossless(Coding coding, const std::byte* values, std::size_t value_count, std::byte* out, Isa isa) {
  std::size_t coded_bytes = 0;
  with_block(coding, [&]<typename Block>() {
    run_with(
        isa, [&](auto)
                 __attribute__((always_inline)) { coded_bytes = encode_values<Block>(isa, values, value_count, out); });
  });
  return coded_bytes;
}

Decoded decode_lossless(Coding coding, std::span<const std::byte> coded, std::byte* values, std::size_t value_count,
                        Isa isa) {
  Decoded done;
  with_block(coding, [&]<typename Block>() {
    run_with(
        isa, [&](auto) __attribute__((always_inline)) { done = Decoding<Block>(coded, values, value_count).run(isa); });
  });
  return done;
}

void difference(const std::byte* values, const std::byte* base, std::byte* out, std::size_t value_count,
                std::size_t width) {
  if (width == sizeof(std::uint32_t)) return difference_of<std::uint32_t>(values, base, out, value_count);
  difference_of<std::uint16_t>(values, base, out, value_count);
}

void add_difference(const std::byte* differences, const std::byte* base, std::byte* values, std::size_t value_count,
                    std::size_t width) {
  if (width == sizeof(std::uint32_t)) return add_difference_of<std::uint32_t>(differences, base, values, value_count);
  add_difference_of<std::uint16_t>(differences, base, values, value_count);
}

}  // namespace poseidon::kernel
