// Which workers of a job are connected to each other.
#pragma once

#include <bit>
#include <cstddef>

namespace poseidon {

/// Up to this many workers, all are connected to each other from the beginning. In larger jobs each is first connected
/// to few others, so that no process has connections to all workers that it does not use. The rest follows when a step
/// takes a scheme whose workers send to each other.
inline constexpr std::size_t kFullMesh = 64;

/// Whether two ranks watch each other, and are connected from the beginning. In large jobs these are ranks whose
/// distance, in a circle, is a power of two. So what one knows reaches all over at most log2 P others.
inline bool are_neighbours(std::size_t rank, std::size_t other, std::size_t worker_count) {
  if (rank == other) return false;
  if (worker_count <= kFullMesh) return true;
  const std::size_t distance = rank < other ? other - rank : rank - other;
  return std::has_single_bit(distance) || std::has_single_bit(worker_count - distance);
}

/// The number of neighbours of each rank.
inline std::size_t neighbour_count(std::size_t worker_count) {
  std::size_t count = 0;
  for (std::size_t other = 1; other < worker_count; ++other) count += are_neighbours(0, other, worker_count) ? 1 : 0;
  return count;
}

}  // namespace poseidon
