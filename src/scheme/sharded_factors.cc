#include "scheme/sharded_factors.h"

#include <algorithm>
#include <cstring>

#include "base/invariant.h"
#include "scheme/conversion.h"

namespace poseidon {

namespace {

/// Each worker sends each server its part of the long factor and all of the short one, and gets the server's block.
SchemeCost sharded_factors_cost(std::size_t rows, std::size_t cols, double factor_count, const Cluster& cluster) {
  const auto length = static_cast<double>(std::max(rows, cols));
  const auto width = static_cast<double>(std::min(rows, cols));
  const double workers = cluster.worker_count;
  const double blocks = std::min<double>(cluster.server_count, length);
  const double pair = factor_count * (length / blocks + width) + length / blocks * width;
  return {blocks * pair, workers * pair, (workers + blocks - 2) * pair};
}

double sharded_factors_multiply_adds(std::size_t rows, std::size_t cols, double factor_count, const Cluster& cluster) {
  const double blocks = std::min<double>(cluster.server_count, static_cast<double>(std::max(rows, cols)));
  return cluster.worker_count * factor_count * static_cast<double>(rows) * static_cast<double>(cols) / blocks;
}

bool contiguous(const ExchangeUnit& about, const Block& block) { return block.col_count == about.cols; }

std::size_t value_count(const Block& block) { return block.row_count * block.col_count; }

const Block& block_of(const Unit& unit, std::uint32_t chunk) {
  const auto block = std::ranges::lower_bound(unit.blocks, chunk, {}, &Block::chunk);
  invariant(block != unit.blocks.end() && block->chunk == chunk, "only chunks with a block are awaited");
  return *block;
}

/// Marks every block as awaited. Other chunks have no answer.
void expect_blocks(Exchange& exchange) {
  ServerAnswers& answers = exchange.progress.answers.emplace();
  answers.chunks.assign(exchange.unit().chunks.size(), ChunkArrival::received);
  for (const Block& block : exchange.unit().blocks) answers.chunks[block.chunk] = ChunkArrival::awaited;
  answers.missing_count = exchange.unit().blocks.size();
}

/// Returns columns [first, first + count) of a factor. They are where they lie, or a copy that lives until the exchange
/// ends.
std::span<const std::byte> columns_of(Exchange& exchange, const Links& links, const std::byte* factor,
                                      std::size_t factor_rows, std::size_t factor_cols, std::size_t first,
                                      std::size_t count) {
  const std::size_t element_bytes = dtype_bytes(exchange.unit().factor_dtype);
  const std::size_t row_bytes = count * element_bytes;
  if (count == factor_cols) return {factor, factor_rows * row_bytes};
  const std::span<std::byte> copy =
      exchange.progress.converted.emplace_back(links.pool->take(factor_rows * row_bytes)).span();
  for (std::size_t row = 0; row < factor_rows; ++row)
    std::memcpy(copy.data() + row * row_bytes, factor + (row * factor_cols + first) * element_bytes, row_bytes);
  return copy;
}

Pieces factors_of(Exchange& exchange, const Links& links, const FactoredGradient& factored, const Block& block) {
  const ExchangeUnit& about = exchange.about;
  Pieces pieces;
  for (const FactorRows& rows : factored.rows)
    if (rows.count > 0)
      pieces.push_back(columns_of(exchange, links, rows.left, rows.count, about.rows, block.row, block.row_count));
  for (const FactorRows& rows : factored.rows)
    if (rows.count > 0)
      pieces.push_back(columns_of(exchange, links, rows.right, rows.count, about.cols, block.col, block.col_count));
  return pieces;
}

/// Returns a block of the dense gradient, in the type in which factors travel.
std::span<const std::byte> dense_block(Exchange& exchange, const Links& links, std::span<const std::byte> gradient,
                                       const Block& block) {
  const Unit& unit = exchange.unit();
  const std::size_t cols = exchange.about.cols;
  const std::byte* const first = gradient.data() + (block.row * cols + block.col) * dtype_bytes(unit.dtype);
  if (!unit.converts_factors())
    return contiguous(exchange.about, block)
               ? std::span(first, value_count(block) * dtype_bytes(unit.dtype))
               : columns_of(exchange, links, first, block.row_count, cols, 0, block.col_count);
  const std::size_t row_bytes = array_bytes(unit.factor_dtype, block.col_count);
  const std::span<std::byte> copy =
      exchange.progress.converted.emplace_back(links.pool->take(block.row_count * row_bytes)).span();
  for (std::size_t row = 0; row < block.row_count; ++row)
    kernel::encode(unit.factor_dtype, reinterpret_cast<const float*>(first) + row * cols, copy.data() + row * row_bytes,
                   block.col_count);
  return copy;
}

Pieces block_payload(Exchange& exchange, const Links& links, const Block& block) {
  if (const auto* factored = exchange.gradient<FactoredGradient>())
    return factors_of(exchange, links, *factored, block);
  if (const auto* dense = exchange.gradient<DenseGradient>()) return {dense_block(exchange, links, dense->data, block)};
  return {};
}

/// Returns the memory of the result from the block's first value on.
std::byte* place_of(const Exchange& exchange, const Block& block) {
  const std::size_t first = block.row * exchange.about.cols + block.col;
  return exchange.progress.result.data() + first * dtype_bytes(exchange.unit().dtype);
}

/// Writes a block to its place in the result.
void write_block(const Exchange& exchange, const Block& block, std::span<const std::byte> payload) {
  const Unit& unit = exchange.unit();
  invariant(payload.size() == array_bytes(unit.factor_dtype, value_count(block)), "a result has the size of its block");
  std::byte* const place = place_of(exchange, block);
  if (payload.data() == place) return;
  const std::size_t row_bytes = array_bytes(unit.factor_dtype, block.col_count);
  const std::size_t stride_bytes = exchange.about.cols * dtype_bytes(unit.dtype);
  for (std::size_t row = 0; row < block.row_count; ++row) {
    const std::byte* const from = payload.data() + row * row_bytes;
    std::byte* const to = place + row * stride_bytes;
    if (unit.converts_factors())
      kernel::decode(unit.factor_dtype, from, reinterpret_cast<float*>(to), block.col_count);
    else
      std::memcpy(to, from, row_bytes);
  }
}

}  // namespace

void ShardedFactors::start(Exchange& exchange, const Links& links) const {
  expect_blocks(exchange);
  // A server multiplies factors of one type, and its result has that type.
  if (exchange.gradient<FactoredGradient>() != nullptr) convert_factors(exchange, links, NarrowFactors::convert);
  wire::Contribution body = contribution_of(exchange, links, wire::Kind::factors);
  body.dense = exchange.gradient<DenseGradient>() != nullptr;
  const Unit& unit = exchange.unit();
  // Every worker starts at another block, which spreads the senders over the servers' ports.
  for (std::size_t i = 0; i < unit.blocks.size(); ++i) {
    const Block& block = unit.blocks[(links.rank + i) % unit.blocks.size()];
    body.chunk = block.chunk;
    body.rows = static_cast<std::uint32_t>(block.row_count);
    body.cols = static_cast<std::uint32_t>(block.col_count);
    send_to_server(exchange, links, unit.chunks[block.chunk], body.make(), block_payload(exchange, links, block));
  }
  exchange.complete_if_done();
}

Result<std::span<std::byte>> ShardedFactors::accept(Exchange& exchange, const wire::Header& header, bool lent,
                                                    const Links& links) const {
  if (Status status = check_awaited(exchange, header, links); !status.ok()) return status;
  const Unit& unit = exchange.unit();
  const Block& block = block_of(unit, header.chunk);
  const std::size_t size_bytes = array_bytes(unit.factor_dtype, value_count(block));
  if (Status status = check_payload(header, unit.factor_dtype, size_bytes); !status.ok()) return status;
  ServerAnswers& answers = exchange.progress.awaited();
  answers.chunks[header.chunk] = ChunkArrival::accepted;
  if (lent || header.payload_bytes == 0) return std::span<std::byte>();
  if (contiguous(exchange.about, block) && !unit.converts_factors())
    return std::span(place_of(exchange, block), size_bytes);
  answers.staged.resize(unit.chunks.size());
  Buffer& buffer = answers.staged[header.chunk];
  buffer = links.pool->take(size_bytes);
  return buffer.span();
}

Status ShardedFactors::receive(Exchange& exchange, const wire::Header& header, std::span<const std::byte> payload,
                               const Links& links) const {
  // A worker contributes to all blocks of a step or to none.
  const bool first = exchange.progress.awaited().missing_count == exchange.unit().blocks.size();
  if (!first && exchange.outcome.present == wire::StepResult::read(header).absent)
    return {ErrorCode::mismatch, "some blocks of the layer have a result and others have none"};
  if (!payload.empty()) write_block(exchange, block_of(exchange.unit(), header.chunk), payload);
  auto& staged = exchange.progress.awaited().staged;
  if (header.chunk < staged.size()) links.pool->give_back(std::move(staged[header.chunk]));
  note_received(exchange, header, links);
  return {};
}

const SchemeProtocol& sharded_factors_scheme() {
  static const ShardedFactors scheme({
      .title = "sharded factors",
      .summary = "Factors to the servers, each of which multiplies one block of the matrix.",
      .takes_factors = true,
      .converts = true,
      .uses_servers = true,
      .automatic = true,
      .one_way_at_a_time = true,
      .cost = sharded_factors_cost,
      .multiply_adds = sharded_factors_multiply_adds,
  });
  return scheme;
}

}  // namespace poseidon
