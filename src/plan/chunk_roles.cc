#include "plan/chunk_roles.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/invariant.h"
#include "plan/partition.h"

namespace poseidon {

namespace {

/// A chunk of all ranks' concern.
struct SharedChunk {
  std::uint32_t number = 0;
  std::size_t offset_bytes = 0;
  std::size_t size_bytes = 0;
  std::size_t total_bytes = 0;
  std::uint32_t owner = 0;
};

/// What all roles in a chunk have.
ChunkRole role_in(const SharedChunk& chunk) {
  return {.chunk = chunk.number, .size_bytes = chunk.size_bytes, .total_bytes = chunk.total_bytes};
}

class Roles {
 public:
  Roles(const CollectiveShape& shape, const Hosts& hosts) : shape_(shape), hosts_(hosts) {}

  std::vector<ChunkRole> make() {
    switch (shape_.kind) {
      case CollectiveKind::all_reduce:
      case CollectiveKind::barrier:
        all_reduce();
        break;
      case CollectiveKind::reduce:
        reduce();
        break;
      case CollectiveKind::reduce_scatter:
        reduce_scatter();
        break;
      case CollectiveKind::all_gather:
        all_gather();
        break;
      case CollectiveKind::broadcast:
        broadcast();
        break;
      case CollectiveKind::gather:
      case CollectiveKind::scatter:
      case CollectiveKind::all_to_all:
        pairs();
        break;
    }
    return std::move(roles_);
  }

 private:
  bool is_root() const { return shape_.rank == shape_.root; }

  /// Pieces of an array of which one rank has all of something. An empty array has one, too: so ranks know that they
  /// agree.
  std::vector<SharedChunk> pieces_of(std::size_t size_bytes, std::uint32_t first, std::uint32_t stride,
                                     std::uint32_t owner) const {
    std::vector<SharedChunk> pieces;
    for (std::size_t offset = 0; offset < size_bytes; offset += shape_.chunk_bytes)
      pieces.push_back({static_cast<std::uint32_t>(first + pieces.size() * stride), offset,
                        std::min(shape_.chunk_bytes, size_bytes - offset), size_bytes, owner});
    if (pieces.empty()) pieces.push_back({.number = first, .owner = owner});
    return pieces;
  }

  /// Chunks of an array whose owners take turns, so that all have about as much.
  std::vector<SharedChunk> spread(std::size_t size_bytes, const std::vector<std::uint32_t>& owners) const {
    std::vector<SharedChunk> chunks;
    const std::size_t chunk_bytes = spread_chunk_bytes(size_bytes, owners.size(), shape_.chunk_bytes);
    for (std::size_t offset = 0; offset < size_bytes; offset += chunk_bytes)
      chunks.push_back({static_cast<std::uint32_t>(chunks.size()), offset, std::min(chunk_bytes, size_bytes - offset),
                        size_bytes, owners[chunks.size() % owners.size()]});
    if (chunks.empty()) chunks.push_back({.owner = owners.front()});
    return chunks;
  }

  std::vector<std::uint32_t> all_ranks() const {
    std::vector<std::uint32_t> ranks(shape_.size);
    std::iota(ranks.begin(), ranks.end(), 0u);
    return ranks;
  }

  /// To whom a rank gives its part of a reduction's chunk, or nullopt for the owner.
  std::optional<std::uint32_t> parent_of(std::uint32_t rank, const SharedChunk& chunk) const {
    if (rank == chunk.owner) return std::nullopt;
    if (!hosts_.together()) return chunk.owner;
    const Chunk placed{.index = chunk.number, .server = static_cast<int>(chunk.owner)};
    return hosts_.next(rank, no_unit_, placed).value_or(chunk.owner);
  }

  /// 0: the parts of this machine, 1: of this rack, 2: of others.
  std::size_t level_of(std::uint32_t rank) const {
    if (!hosts_.together() || hosts_.share_host(rank, shape_.rank)) return 0;
    return hosts_.share_rack(rank, shape_.rank) ? 1 : 2;
  }

  /// The way up of a chunk of which all ranks have a part.
  ChunkRole reduced(const SharedChunk& chunk, std::size_t array) const {
    ChunkRole role = role_in(chunk);
    role.input = ChunkPlace{array, chunk.offset_bytes};
    role.parent = parent_of(shape_.rank, chunk);
    std::vector<std::vector<std::uint32_t>> levels(3);
    for (std::uint32_t rank = 0; rank < shape_.size; ++rank)
      if (parent_of(rank, chunk) == shape_.rank) levels[level_of(rank)].push_back(rank);
    for (auto& level : levels)
      if (!level.empty()) role.levels.push_back(std::move(level));
    return role;
  }

  /// The way down of the result to those who combined it.
  void give_back(ChunkRole& role, std::size_t array, std::size_t offset_bytes) const {
    role.output = ChunkPlace{array, offset_bytes};
    role.source = role.parent;
    for (const auto& level : role.levels) role.receivers.insert(role.receivers.end(), level.begin(), level.end());
  }

  void all_reduce() {
    const std::size_t size_bytes = shape_.input_bytes.empty() ? 0 : shape_.input_bytes.front();
    if (is_combined_by_all(shape_)) return combine_by_all(size_bytes);
    for (const SharedChunk& chunk : spread(size_bytes, all_ranks())) {
      ChunkRole role = reduced(chunk, 0);
      give_back(role, 0, chunk.offset_bytes);
      roles_.push_back(std::move(role));
    }
  }

  void combine_by_all(std::size_t size_bytes) {
    for (std::uint32_t i = 0; i < shape_.size; ++i) {
      const std::uint32_t owner = (shape_.rank + i) % shape_.size;
      ChunkRole role = role_in({.number = owner, .size_bytes = size_bytes, .total_bytes = size_bytes});
      role.input = ChunkPlace{};
      if (owner != shape_.rank) {
        role.parent = owner;
      } else {
        role.output = ChunkPlace{};
        auto others = all_ranks();
        std::erase(others, shape_.rank);
        if (!others.empty()) role.levels.push_back(std::move(others));
      }
      roles_.push_back(std::move(role));
    }
  }

  void reduce() {
    const std::size_t size_bytes = shape_.input_bytes.front();
    const auto owners = size_bytes <= kSentByRootBytes ? std::vector{shape_.root} : all_ranks();
    for (const SharedChunk& chunk : spread(size_bytes, owners)) {
      ChunkRole role = reduced(chunk, 0);
      if (is_root()) {
        role.output = ChunkPlace{0, chunk.offset_bytes};
        if (chunk.owner != shape_.root) role.source = chunk.owner;
      } else if (chunk.owner == shape_.rank) {
        role.receivers = {shape_.root};
      }
      roles_.push_back(std::move(role));
    }
  }

  void reduce_scatter() {
    for (std::uint32_t i = 0; i < shape_.size; ++i) {
      const std::uint32_t owner = (shape_.rank + i) % shape_.size;
      for (const SharedChunk& chunk : pieces_of(shape_.input_bytes[owner], owner, shape_.size, owner)) {
        ChunkRole role = reduced(chunk, owner);
        if (owner == shape_.rank) role.output = ChunkPlace{0, chunk.offset_bytes};
        roles_.push_back(std::move(role));
      }
    }
  }

  /// Who gives this rank what the owner gives to all, and to whom this rank passes it on.
  void give_to_all(ChunkRole& role, std::uint32_t owner) const {
    if (owner != shape_.rank) role.source = hosts_.source_of(shape_.rank, owner);
    for (std::uint32_t i = 1; i < shape_.size; ++i) {
      const std::uint32_t rank = (shape_.rank + i) % shape_.size;
      if (rank != owner && hosts_.source_of(rank, owner) == shape_.rank) role.receivers.push_back(rank);
    }
  }

  void all_gather() {
    for (std::uint32_t i = 0; i < shape_.size; ++i) {
      const std::uint32_t owner = (shape_.rank + i) % shape_.size;
      for (const SharedChunk& chunk : pieces_of(shape_.output_bytes[owner], owner, shape_.size, owner)) {
        ChunkRole role = role_in(chunk);
        if (owner == shape_.rank) role.input = ChunkPlace{0, chunk.offset_bytes};
        role.output = ChunkPlace{owner, chunk.offset_bytes};
        give_to_all(role, owner);
        roles_.push_back(std::move(role));
      }
    }
  }

  /// A large array's root gives a share to each other rank, which gives it to all.
  void broadcast() {
    const std::size_t size_bytes = is_root() ? shape_.input_bytes.front() : shape_.output_bytes.front();
    std::vector<std::uint32_t> owners = all_ranks();
    std::erase(owners, shape_.root);
    if (owners.size() < 2 || size_bytes <= kSentByRootBytes) owners = {shape_.root};
    for (const SharedChunk& chunk : spread(size_bytes, owners)) {
      ChunkRole role = role_in(chunk);
      if (is_root()) role.input = ChunkPlace{0, chunk.offset_bytes};
      if (!is_root()) role.output = ChunkPlace{0, chunk.offset_bytes};
      give_to_all(role, chunk.owner);
      if (chunk.owner != shape_.root) hand_over(role, chunk.owner);
      roles_.push_back(std::move(role));
    }
  }

  /// The root has the chunk already, and gives it to its owner.
  void hand_over(ChunkRole& role, std::uint32_t owner) const {
    if (is_root()) {
      role.parent = owner;
      role.source.reset();
    } else {
      std::erase(role.receivers, shape_.root);
      if (owner == shape_.rank) role.levels = {{shape_.root}};
    }
  }

  /// What goes from one rank to another one.
  void pairs() {
    for (std::uint32_t i = 0; i < shape_.size; ++i) {
      const std::uint32_t other = (shape_.rank + i) % shape_.size;
      if (gives(shape_.rank, other))
        for (const SharedChunk& chunk : pair(shape_.rank, other, bytes_at(shape_.input_bytes, other))) {
          ChunkRole& role = roles_.emplace_back(role_in(chunk));
          role.input = ChunkPlace{array_of(shape_.input_bytes, other), chunk.offset_bytes};
          if (other == shape_.rank)
            role.output = ChunkPlace{array_of(shape_.output_bytes, other), chunk.offset_bytes};
          else
            role.parent = other;
        }
      if (i > 0 && gives(other, shape_.rank))
        for (const SharedChunk& chunk : pair(other, shape_.rank, bytes_at(shape_.output_bytes, other))) {
          ChunkRole& role = roles_.emplace_back(role_in(chunk));
          role.output = ChunkPlace{array_of(shape_.output_bytes, other), chunk.offset_bytes};
          role.levels = {{other}};
        }
    }
  }

  bool gives(std::uint32_t from, std::uint32_t to) const {
    if (shape_.kind == CollectiveKind::gather) return to == shape_.root;
    return shape_.kind == CollectiveKind::all_to_all || from == shape_.root;
  }

  std::vector<SharedChunk> pair(std::uint32_t from, std::uint32_t to, std::size_t size_bytes) const {
    return pieces_of(size_bytes, from * shape_.size + to, shape_.size * shape_.size, to);
  }

  /// Which of the arrays is for, or from, a rank: there is one for each, or one alone.
  std::size_t array_of(const std::vector<std::size_t>& bytes, std::uint32_t rank) const {
    return has_one_each(bytes) ? rank : 0;
  }
  std::size_t bytes_at(const std::vector<std::size_t>& bytes, std::uint32_t rank) const {
    return bytes[array_of(bytes, rank)];
  }
  bool has_one_each(const std::vector<std::size_t>& bytes) const {
    if (shape_.kind == CollectiveKind::all_to_all) return true;
    return (shape_.kind == CollectiveKind::gather) == (&bytes == &shape_.output_bytes);
  }

  const CollectiveShape& shape_;
  const Hosts& hosts_;
  const Unit no_unit_{};
  std::vector<ChunkRole> roles_;
};

Status invalid_call(const std::string& why) { return {ErrorCode::invalid_argument, why}; }

/// How many arrays a rank has.
struct ArrayCounts {
  std::size_t inputs = 0;
  std::size_t outputs = 0;
};

ArrayCounts counts_of(const CollectiveShape& shape) {
  const bool root = shape.rank == shape.root;
  const std::size_t all = shape.size;
  switch (shape.kind) {
    case CollectiveKind::all_reduce:
      return {1, 1};
    case CollectiveKind::reduce:
      return {1, root ? 1u : 0u};
    case CollectiveKind::reduce_scatter:
      return {all, 1};
    case CollectiveKind::all_gather:
      return {1, all};
    case CollectiveKind::gather:
      return {1, root ? all : 0};
    case CollectiveKind::broadcast:
      return root ? ArrayCounts{1, 0} : ArrayCounts{0, 1};
    case CollectiveKind::scatter:
      return {root ? all : 0, 1};
    case CollectiveKind::all_to_all:
      return {all, all};
    case CollectiveKind::barrier:
      break;
  }
  return {};
}

/// Whether what this rank gives to itself, or replaces, has one size.
bool sizes_fit(const CollectiveShape& shape) {
  const auto& in = shape.input_bytes;
  const auto& out = shape.output_bytes;
  if (in.empty() || out.empty()) return true;
  switch (shape.kind) {
    case CollectiveKind::reduce_scatter:
    case CollectiveKind::scatter:
      return in[shape.rank] == out.front();
    case CollectiveKind::all_gather:
    case CollectiveKind::gather:
      return in.front() == out[shape.rank];
    case CollectiveKind::all_to_all:
      return in[shape.rank] == out[shape.rank];
    default:
      return in.front() == out.front();
  }
}

}  // namespace

CollectiveShape shape_of_call(const CollectiveCall& call, std::uint32_t rank, std::uint32_t size,
                              std::size_t chunk_bytes) {
  CollectiveShape shape;
  shape.kind = call.kind;
  for (const auto& input : call.inputs) shape.input_bytes.push_back(input.size());
  for (const auto& output : call.outputs) shape.output_bytes.push_back(output.size());
  shape.root = call.root;
  shape.rank = rank;
  shape.size = size;
  shape.chunk_bytes = chunk_bytes;
  return shape;
}

bool is_combined_by_all(const CollectiveShape& shape) {
  if (shape.size > kCombinedByAllRanks) return false;
  if (shape.kind == CollectiveKind::barrier) return true;
  return shape.kind == CollectiveKind::all_reduce && shape.input_bytes.front() <= kCombinedByAllBytes;
}

std::vector<ChunkRole> roles_of(const CollectiveShape& shape, const Hosts& hosts) {
  invariant(shape.rank < shape.size && shape.chunk_bytes > 0, "a collective has ranks and chunks");
  return Roles(shape, hosts).make();
}

Status check_shape(const CollectiveShape& shape) {
  const std::string name(collective_name(shape.kind));
  if (shape.root >= shape.size)
    return invalid_call(concat(name, " has the root ", shape.root, " of ", shape.size, " ranks; give one of them"));
  const ArrayCounts counts = counts_of(shape);
  if (shape.input_bytes.size() != counts.inputs || shape.output_bytes.size() != counts.outputs)
    return invalid_call(concat(name, " takes ", counts.inputs, " inputs and ", counts.outputs, " outputs here, not ",
                               shape.input_bytes.size(), " and ", shape.output_bytes.size(), "; give as many"));
  if (!sizes_fit(shape))
    return invalid_call(name +
                        " has an output of another size than the input that this rank gives to itself; give one size");
  return {};
}

}  // namespace poseidon
