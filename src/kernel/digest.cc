#include "poseidon/digest.h"

#include <array>
#include <bit>
#include <cstring>

namespace poseidon {

namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::uint64_t kPrimes[] = {0x9e3779b185ebca87, 0xc2b2ae3d27d4eb4f, 0x165667b19e3779f9, 0x85ebca77c2b2ae63,
                                     0x27d4eb2f165667c5};
constexpr std::size_t kLanes = 4;  // independent chains, which hide the latency of multiplications

template <typename Word>
std::uint64_t word_at(const std::byte* data) {
  Word word = 0;
  std::memcpy(&word, data, sizeof word);
  return word;
}

constexpr std::uint64_t mixed(std::uint64_t lane, std::uint64_t word) {
  return std::rotl(lane + word * kPrimes[1], 31) * kPrimes[0];
}

/// Every bit of the result depends on every bit of `state`.
constexpr std::uint64_t spread(std::uint64_t state) {
  state = (state ^ (state >> 33)) * kPrimes[1];
  state = (state ^ (state >> 29)) * kPrimes[2];
  return state ^ (state >> 32);
}

/// What the whole blocks of `data` come to. Moves `data` behind them.
std::uint64_t take_blocks(std::span<const std::byte>& data) {
  constexpr std::size_t kWordBytes = sizeof(std::uint64_t);
  constexpr std::size_t kBlockBytes = kLanes * kWordBytes;
  if (data.size() < kBlockBytes) return kPrimes[4];
  std::array<std::uint64_t, kLanes> lanes{kPrimes[0] + kPrimes[1], kPrimes[1], 0, 0 - kPrimes[0]};
  for (; data.size() >= kBlockBytes; data = data.subspan(kBlockBytes))
    for (std::size_t lane = 0; lane < kLanes; ++lane)
      lanes[lane] = mixed(lanes[lane], word_at<std::uint64_t>(data.data() + lane * kWordBytes));
  std::uint64_t state =
      std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) + std::rotl(lanes[3], 18);
  for (const std::uint64_t lane : lanes) state = (state ^ mixed(0, lane)) * kPrimes[0] + kPrimes[3];
  return state;
}

}  // namespace

std::uint64_t digest(std::span<const std::byte> data) {
  const std::size_t size = data.size();
  std::uint64_t state = take_blocks(data) + size;
  for (; data.size() >= sizeof(std::uint64_t); data = data.subspan(sizeof(std::uint64_t)))
    state = std::rotl(state ^ mixed(0, word_at<std::uint64_t>(data.data())), 27) * kPrimes[0] + kPrimes[3];
  if (data.size() >= sizeof(std::uint32_t)) {
    state = std::rotl(state ^ (word_at<std::uint32_t>(data.data()) * kPrimes[0]), 23) * kPrimes[1] + kPrimes[2];
    data = data.subspan(sizeof(std::uint32_t));
  }
  for (const std::byte byte : data)
    state = std::rotl(state ^ (std::to_integer<std::uint64_t>(byte) * kPrimes[4]), 11) * kPrimes[0];
  return spread(state);
}

}  // namespace poseidon
