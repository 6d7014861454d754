#include "plan/partition.h"

#include <algorithm>
#include <numeric>

namespace poseidon {
namespace {

std::size_t divide_up(std::size_t value, std::size_t divisor) {
  return value / divisor + (value % divisor != 0 ? 1 : 0);
}

/// Whether the unit's dense gradient normally does not travel.
bool usually_factors(const Plan& plan, const Unit& unit) {
  if (unit.layers.size() != 1) return false;
  const Scheme scheme = plan.layers[unit.layers.front()].scheme;
  return scheme == Scheme::automatic || scheme == Scheme::sfb;
}

/// Adam's strategy gathers a layer's factors in one place.
bool needs_one_shard(const Plan& plan, const Unit& unit) {
  return unit.layers.size() == 1 && plan.layers[unit.layers.front()].scheme == Scheme::adam;
}

void cut(Unit& unit, std::size_t chunk_bytes) {
  for (std::size_t offset = 0; offset < unit.size_bytes; offset += chunk_bytes) {
    Chunk chunk;
    chunk.index = static_cast<std::uint32_t>(unit.chunks.size());
    chunk.offset_bytes = offset;
    chunk.size_bytes = std::min(chunk_bytes, unit.size_bytes - offset);
    unit.chunks.push_back(chunk);
  }
}

/// Gives each chunk to the least loaded shard; on a tie to one that has no chunk of the unit yet,
/// then to the one with the lowest index.
void assign_least_loaded(Unit& unit, std::vector<std::size_t>& server_bytes) {
  std::vector<std::size_t> chunk_count(server_bytes.size(), 0);
  for (Chunk& chunk : unit.chunks) {
    std::size_t best = 0;
    for (std::size_t server = 1; server < server_bytes.size(); ++server) {
      const auto load = std::pair(server_bytes[server], chunk_count[server]);
      if (load < std::pair(server_bytes[best], chunk_count[best])) best = server;
    }
    chunk.server = static_cast<int>(best);
    server_bytes[best] += chunk.size_bytes;
    ++chunk_count[best];
  }
}

void assign_round_robin(Plan& plan) {
  std::size_t next = 0;
  for (Unit& unit : plan.units) {
    cut(unit, unit.size_bytes);
    for (Chunk& chunk : unit.chunks) {
      chunk.server = static_cast<int>(next);
      plan.server_bytes[next] += chunk.size_bytes;
      next = (next + 1) % plan.server_bytes.size();
    }
  }
}

}  // namespace

std::size_t spread_chunk_bytes(std::size_t size_bytes, int server_count, std::size_t chunk_bytes) {
  // Every shard gets an equal share of every layer, so that all ports are busy for each layer, as in
  // a ring: where one shard held more than the others, the layer would wait for that shard's port.
  // A share above `chunk_bytes` is cut further, still into as many pieces on every shard.
  const auto servers = static_cast<std::size_t>(server_count);
  const std::size_t cap = std::max(kChunkAlignmentBytes, chunk_bytes / kChunkAlignmentBytes * kChunkAlignmentBytes);
  const std::size_t share = std::max(kMinChunkBytes, divide_up(size_bytes, servers));
  const std::size_t piece = divide_up(share, divide_up(share, cap));
  return std::min(cap, divide_up(piece, kChunkAlignmentBytes) * kChunkAlignmentBytes);
}

void assign_chunks(Plan& plan, const Options& options) {
  plan.server_bytes.assign(static_cast<std::size_t>(plan.cluster.server_count), 0);
  if (options.partition == Partition::coarse) return assign_round_robin(plan);

  std::vector<std::size_t> order(plan.units.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  for (Unit& unit : plan.units) {
    cut(unit, needs_one_shard(plan, unit)
                  ? unit.size_bytes
                  : spread_chunk_bytes(unit.size_bytes, plan.cluster.server_count, options.chunk_bytes));
  }
  // Units whose chunks always travel come first, so that their loads alone are balanced; among those,
  // largest chunks first. A unit's chunks stay together, or it would not be spread evenly.
  const auto rank = [&plan](std::size_t index) {
    const Unit& unit = plan.units[index];
    const std::size_t largest = unit.chunks.empty() ? 0 : unit.chunks.front().size_bytes;
    return std::pair(usually_factors(plan, unit), ~largest);
  };
  std::stable_sort(order.begin(), order.end(), [&rank](std::size_t a, std::size_t b) { return rank(a) < rank(b); });
  for (const std::size_t index : order) assign_least_loaded(plan.units[index], plan.server_bytes);
}

}  // namespace poseidon
