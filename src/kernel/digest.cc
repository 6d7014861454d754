#include "poseidon/digest.h"

#include <array>
#include <bit>
#include <cstring>

namespace poseidon {

namespace {

constexpr std::size_t kLanes = 8;  // as many independent chains as hide the latency of a multiplication
constexpr std::size_t kWordBytes = sizeof(std::uint64_t);
constexpr std::size_t kBlockBytes = kLanes * kWordBytes;
constexpr std::uint64_t kPrime = 0x9e3779b185ebca87;  // of XXH64
constexpr std::uint64_t kSeed = 0xc2b2ae3d27d4eb4f;

/// For each `state` another result for each `word`, and the reverse. The rotation brings the highest bits, which a
/// product keeps where they are, to where the next product spreads them.
constexpr std::uint64_t mixed(std::uint64_t state, std::uint64_t word) {
  return std::rotl((state ^ word) * kPrime, 29);
}

std::uint64_t word_at(const std::byte* data) {
  std::uint64_t word = 0;
  std::memcpy(&word, data, sizeof word);
  return word;
}

/// Every bit of the result depends on every bit of `state`.
constexpr std::uint64_t spread(std::uint64_t state) {
  state = (state ^ (state >> 33)) * kSeed;
  state = (state ^ (state >> 29)) * kPrime;
  return state ^ (state >> 32);
}

}  // namespace

std::uint64_t digest(std::span<const std::byte> data) {
  std::array<std::uint64_t, kLanes> lanes{};
  for (std::size_t lane = 0; lane < kLanes; ++lane) lanes[lane] = kSeed * (lane + 1);
  std::size_t at = 0;
  for (; at + kBlockBytes <= data.size(); at += kBlockBytes)
    for (std::size_t lane = 0; lane < kLanes; ++lane)
      lanes[lane] = mixed(lanes[lane], word_at(data.data() + at + lane * kWordBytes));
  std::uint64_t result = mixed(kSeed, data.size());
  for (const std::uint64_t lane : lanes) result = mixed(result, lane);
  for (; at + kWordBytes <= data.size(); at += kWordBytes) result = mixed(result, word_at(data.data() + at));
  for (; at < data.size(); ++at) result = mixed(result, std::to_integer<std::uint64_t>(data[at]));
  return spread(result);
}

}  // namespace poseidon
