#include "plan/partition.h"

#include <numeric>
#include <span>

#include "base/invariant.h"

namespace poseidon {
namespace {

std::size_t divide_up(std::size_t value, std::size_t divisor) {
  return value / divisor + (value % divisor != 0 ? 1 : 0);
}

/// Whether the unit's dense gradient is normally not sent.
bool usually_factors(const Plan& plan, const Unit& unit) {
  if (unit.layers.size() != 1) return false;
  const Scheme scheme = plan.layers[unit.layers.front()].scheme;
  return scheme == Scheme::automatic || !traits_of(scheme).uses_servers;
}

/// Whether the unit must lie on one shard in one piece, because its layer or its scheme requires it.
bool needs_one_shard(const Plan& plan, const Unit& unit) {
  if (unit.layers.size() != 1) return false;
  const Layer& layer = plan.layers[unit.layers.front()];
  return layer.whole || (layer.scheme != Scheme::automatic && traits_of(layer.scheme).needs_whole_layer);
}

/// Chunks but for the last consist of whole elements of what travels.
std::size_t alignment_bytes(const Unit& unit) {
  return std::max(kChunkAlignmentBytes, dtype_values(unit.wire_dtype) * dtype_bytes(unit.dtype));
}

void cut(Unit& unit, std::size_t chunk_bytes) {
  invariant(chunk_bytes > 0 || unit.size_bytes == 0, "a chunk is not empty");
  for (std::size_t offset = 0; offset < unit.size_bytes; offset += chunk_bytes) {
    Chunk chunk;
    chunk.index = static_cast<std::uint32_t>(unit.chunks.size());
    chunk.offset_bytes = offset;
    chunk.size_bytes = std::min(chunk_bytes, unit.size_bytes - offset);
    unit.chunks.push_back(chunk);
  }
}

/// Assigns each chunk to the least loaded of the shards. On a tie it prefers a shard that has no chunk of the unit yet,
/// and then the lowest index.
void assign_least_loaded(Unit& unit, std::span<std::size_t> server_bytes) {
  invariant(!server_bytes.empty(), "a plan has a server");
  std::vector<std::size_t> chunk_count(server_bytes.size(), 0);
  for (Chunk& chunk : unit.chunks) {
    std::size_t best = 0;
    for (std::size_t server = 1; server < server_bytes.size(); ++server) {
      const auto load = std::pair(server_bytes[server], chunk_count[server]);
      if (load < std::pair(server_bytes[best], chunk_count[best])) best = server;
    }
    chunk.server = static_cast<int>(best);
    server_bytes[best] += unit.bytes_as(unit.wire_dtype, chunk.size_bytes);
    ++chunk_count[best];
  }
}

void assign_round_robin(Plan& plan) {
  std::size_t next = 0;
  for (Unit& unit : plan.units) {
    cut(unit, unit.size_bytes);
    for (Chunk& chunk : unit.chunks) {
      chunk.server = static_cast<int>(next);
      plan.server_bytes[next] += unit.bytes_as(unit.wire_dtype, chunk.size_bytes);
      next = (next + 1) % plan.server_bytes.size();
    }
  }
}

/// Spreads each server's chunks over its cores and their flows. The largest chunk comes first and goes to the least
/// loaded lane (Graham's rule: at most 4/3 of the best possible load; Parameter Hub §3.2.4).
void assign_lanes(Plan& plan) {
  std::vector<std::vector<Chunk*>> by_server(plan.server_bytes.size());
  for (Unit& unit : plan.units)
    for (Chunk& chunk : unit.chunks) by_server[static_cast<std::size_t>(chunk.server)].push_back(&chunk);
  const int flow_count = plan.cluster.flow_count;
  for (std::size_t server = 0; server < by_server.size(); ++server) {
    auto& chunks = by_server[server];
    std::stable_sort(chunks.begin(), chunks.end(),
                     [](const Chunk* a, const Chunk* b) { return a->size_bytes > b->size_bytes; });
    // Lane i is flow i / cores of core i % cores. So neighbours of equal load go to different cores.
    const int core_count = plan.cluster.core_count(static_cast<int>(server));
    std::vector<std::size_t> lane_bytes(static_cast<std::size_t>(core_count * flow_count), 0);
    for (Chunk* chunk : chunks) {
      const auto least = std::min_element(lane_bytes.begin(), lane_bytes.end());
      const auto lane = static_cast<int>(least - lane_bytes.begin());
      *least += chunk->size_bytes;
      chunk->core = lane % core_count;
      chunk->flow = lane / core_count;
    }
  }
}

/// The limit of chunks. A dedicated server sends nothing while the first chunk of all workers comes in, and receives
/// nothing while the last one goes out. So a small plan has smaller chunks: 16 workers and 8 servers exchange 400
/// tensors of 16 KiB at 0.94 of a plain copy instead of 0.87. Half as many chunks reach 0.92 behind queues of 1 MB, and
/// 0.73 to 0.83 instead of 0.90 behind queues of 64 KB.
std::size_t chunk_limit_bytes(const Plan& plan, std::size_t chunk_bytes, std::size_t server_count) {
  constexpr std::size_t chunks_for_a_server = 48;
  const std::size_t most = most_chunk_bytes(plan.cluster, chunk_bytes);
  if (plan.cluster.placement == Placement::colocated) return most;
  std::size_t bytes = 0;
  for (const Unit& unit : plan.units) bytes += unit.size_bytes;
  const std::size_t share = bytes / server_count / chunks_for_a_server;
  return std::min(most, std::max(share, kMinChunkBytes));  // what is just above the limit is halved
}

void assign_balanced(Plan& plan, const Options& options) {
  const std::size_t server_count = options.partition == Partition::central ? 1 : plan.server_bytes.size();
  const std::size_t chunk_bytes = chunk_limit_bytes(plan, options.chunk_bytes, server_count);
  std::vector<std::size_t> order(plan.units.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  for (Unit& unit : plan.units) {
    cut(unit, needs_one_shard(plan, unit)
                  ? unit.size_bytes
                  : spread_chunk_bytes(unit.size_bytes, server_count, chunk_bytes, alignment_bytes(unit)));
  }
  // Units whose chunks always travel come first, so that their loads alone are balanced. Among those, the largest
  // chunks come first. A unit's chunks stay together, because the unit would not be spread evenly otherwise.
  const auto rank = [&plan](std::size_t index) {
    const Unit& unit = plan.units[index];
    const std::size_t largest = unit.chunks.empty() ? 0 : unit.chunks.front().size_bytes;
    return std::pair(usually_factors(plan, unit), ~largest);
  };
  std::stable_sort(order.begin(), order.end(), [&rank](std::size_t a, std::size_t b) { return rank(a) < rank(b); });
  const auto servers = std::span(plan.server_bytes).first(server_count);
  for (const std::size_t index : order) assign_least_loaded(plan.units[index], servers);
}

/// Cuts the matrix of a layer whose gradient may be factors along its longer side, into one block for each server that
/// has chunks of it. A block goes the way of the first of these chunks. So it meets a push to that chunk, and the
/// server notices if ranks take different schemes.
void cut_blocks(const Plan& plan, Unit& unit) {
  const Layer& layer = plan.layers[unit.layers.front()];
  if (unit.grouped() || layer.stored || !layer.factorable() || !dtype_is_floating(layer.dtype)) return;
  std::vector<bool> has_block(plan.server_bytes.size(), false);
  for (const Chunk& chunk : unit.chunks) {
    if (has_block[static_cast<std::size_t>(chunk.server)]) continue;
    has_block[static_cast<std::size_t>(chunk.server)] = true;
    unit.blocks.push_back({.chunk = chunk.index, .row_count = layer.rows, .col_count = layer.cols});
  }
  const bool by_rows = layer.rows >= layer.cols;
  const std::size_t length = std::max(layer.rows, layer.cols);
  if (unit.blocks.size() > length) unit.blocks.resize(length);
  const std::size_t count = unit.blocks.size();
  std::size_t begin = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t share = length / count + (i < length % count ? 1 : 0);
    (by_rows ? unit.blocks[i].row : unit.blocks[i].col) = begin;
    (by_rows ? unit.blocks[i].row_count : unit.blocks[i].col_count) = share;
    begin += share;
  }
}

}  // namespace

std::size_t most_chunk_bytes(const Cluster& cluster, std::size_t chunk_bytes) {
  return cluster.placement == Placement::colocated ? chunk_bytes
                                                   : std::min(chunk_bytes, window_bytes(cluster.worker_count));
}

std::size_t spread_chunk_bytes(std::size_t size_bytes, std::size_t server_count, std::size_t chunk_bytes,
                               std::size_t alignment_bytes) {
  // Every shard gets an equal share of every layer, so that all ports are busy for each layer, as in a ring. If one
  // shard held more than the others, the layer would wait for that shard's port. A share above `chunk_bytes` is cut
  // further, into the same number of pieces on every shard.
  invariant(server_count > 0 && alignment_bytes > 0, "a unit is spread over servers, in whole elements");
  const std::size_t cap = std::max(alignment_bytes, chunk_bytes / alignment_bytes * alignment_bytes);
  const std::size_t share = std::max(kMinChunkBytes, divide_up(size_bytes, server_count));
  const std::size_t piece = divide_up(share, divide_up(share, cap));
  return std::min(cap, divide_up(piece, alignment_bytes) * alignment_bytes);
}

void assign_chunks(Plan& plan, const Options& options) {
  plan.server_bytes.assign(static_cast<std::size_t>(plan.cluster.server_count), 0);
  if (options.partition == Partition::coarse)
    assign_round_robin(plan);
  else
    assign_balanced(plan, options);
  assign_lanes(plan);
  for (Unit& unit : plan.units) cut_blocks(plan, unit);
}

}  // namespace poseidon
