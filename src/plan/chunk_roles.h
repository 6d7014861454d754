// Chunk roles: what each rank does with each chunk of a collective. Pure: all ranks come to matching roles.
//
// Every collective is a set of chunks. A chunk has an owner, to whom parts of it go up a tree, and from whom the result
// goes down another one. In a reduction all ranks have parts. Otherwise one rank has the only part, which is the
// result. The trees follow machines and racks (hosts.h), so that a machine's port carries a part, and a result, once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "plan/hosts.h"
#include "poseidon/collective.h"

namespace poseidon {

/// What a collective is, as one rank knows it.
struct CollectiveShape {
  CollectiveKind kind = CollectiveKind::barrier;
  std::vector<std::size_t> input_bytes;   // of CollectiveCall::inputs
  std::vector<std::size_t> output_bytes;  // of CollectiveCall::outputs
  std::uint32_t root = 0;
  std::uint32_t rank = 0;
  std::uint32_t size = 1;  // ranks
  std::size_t chunk_bytes = 0;
};

/// Of a call on this rank of a communicator of so many. `chunk_bytes` is a multiple of each element's size.
CollectiveShape shape_of_call(const CollectiveCall& call, std::uint32_t rank, std::uint32_t size,
                              std::size_t chunk_bytes);

/// Where a chunk lies in a rank's inputs or outputs.
struct ChunkPlace {
  std::size_t array = 0;
  std::size_t offset_bytes = 0;

  bool operator==(const ChunkPlace&) const = default;
};

/// Ranks are those of the communicator.
struct ChunkRole {
  std::uint32_t chunk = 0;  // its number in messages about it
  std::size_t size_bytes = 0;
  std::size_t total_bytes = 0;         // of the array that it is a chunk of
  std::optional<ChunkPlace> input{};   // of this rank's part, if it has one
  std::optional<ChunkPlace> output{};  // of the result, if this rank wants it

  // Up. This rank combines the parts of each level in ascending order of their ranks, and its own among them: first its
  // input, and then what the level before has given. Then it gives the result to `parent`, if it has one.
  std::vector<std::vector<std::uint32_t>> levels{};
  std::optional<std::uint32_t> parent{};

  // Down. Its result comes from `source`, or is what it has combined, or its own input. It gives it to `receivers`.
  std::optional<std::uint32_t> source{};
  std::vector<std::uint32_t> receivers{};
};

/// What is so small that each rank combines all parts itself, in one message from each rank to each other one.
inline constexpr std::size_t kCombinedByAllBytes = std::size_t{4} << 10;
inline constexpr std::size_t kCombinedByAllRanks = 16;
/// What is so small that its root sends it to each rank.
inline constexpr std::size_t kSentByRootBytes = std::size_t{32} << 10;

/// Whether each rank combines all parts itself. Its input is then read after its output is written.
bool is_combined_by_all(const CollectiveShape& shape);

/// The roles of this rank. `hosts` are those of the communicator's ranks. `shape` fits its kind (check_shape).
std::vector<ChunkRole> roles_of(const CollectiveShape& shape, const Hosts& hosts);

/// ErrorCode::invalid_argument: the call has not the inputs and outputs that its kind needs here, or its arrays have
/// sizes that do not go together, or its root is no rank.
Status check_shape(const CollectiveShape& shape);

}  // namespace poseidon
