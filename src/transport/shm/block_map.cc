#include "transport/shm/block_map.h"

#include <algorithm>
#include <bit>

#include "base/invariant.h"

namespace poseidon::shm {

std::optional<std::uint32_t> BlockMap::take(std::uint32_t count) {
  one_thread_.check();
  invariant(count > 0 && count <= kBlockCount, "a run of blocks fits the area, and is not empty");
  for (std::uint32_t first = next(0, false); first < kBlockCount;) {
    const std::uint32_t end = next(first, true);
    if (end - first >= count) {
      mark(first, count, true);
      run_blocks_[first] = count;
      used_count_ += count;
      return first;
    }
    first = next(end, false);
  }
  return std::nullopt;
}

bool BlockMap::give_back(std::uint32_t first) {
  one_thread_.check();
  if (first >= kBlockCount || run_blocks_[first] == 0) return false;
  mark(first, run_blocks_[first], false);
  used_count_ -= run_blocks_[first];
  run_blocks_[first] = 0;
  return true;
}

/// Returns the first block at or after `from` that is in use (`used`) or free. Returns kBlockCount if there is none.
std::uint32_t BlockMap::next(std::uint32_t from, bool used) const {
  while (from < kBlockCount) {
    const std::uint64_t word = (used ? used_[from / 64] : ~used_[from / 64]) >> (from % 64);
    if (word != 0) return from + static_cast<std::uint32_t>(std::countr_zero(word));
    from = (from / 64 + 1) * 64;
  }
  return kBlockCount;
}

void BlockMap::mark(std::uint32_t first, std::uint32_t count, bool used) {
  while (count > 0) {
    const std::uint32_t in_word = std::min(count, 64 - first % 64);
    const std::uint64_t bits = (~std::uint64_t{0} >> (64 - in_word)) << (first % 64);
    if (used) {
      used_[first / 64] |= bits;
    } else {
      used_[first / 64] &= ~bits;
    }
    first += in_word;
    count -= in_word;
  }
}

}  // namespace poseidon::shm
