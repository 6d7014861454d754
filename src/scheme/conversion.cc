#include "scheme/conversion.h"

#include "kernel/kernel.h"
#include "scheme/chunk_payload.h"

namespace poseidon {

namespace {

float* floats(std::byte* bytes) { return reinterpret_cast<float*>(bytes); }
const float* floats(const std::byte* bytes) { return reinterpret_cast<const float*>(bytes); }

/// Whether the chunk's memory holds what is sent and what is received side by side.
bool fits_both(const Exchange& exchange, const Chunk& chunk) {
  const Unit& unit = exchange.unit();
  const std::size_t sent_bytes = unit.bytes_as(unit.wire_dtype, chunk.size_bytes);
  return sent_bytes + unit.bytes_as(exchange.result_dtype(), chunk.size_bytes) <= chunk.size_bytes;
}

std::span<std::byte> pooled(Exchange& exchange, std::size_t size_bytes, const Links& links) {
  return exchange.progress.converted.emplace_back(links.pool->take(size_bytes)).span();
}

/// Rounds a chunk. What is lost is kept for the next step, if the layer keeps it.
void encode_values(Exchange& exchange, const Chunk& chunk, const std::byte* values, std::byte* out) {
  const DType to = exchange.unit().wire_dtype;
  const std::size_t value_count = chunk.size_bytes / sizeof(float);
  const Layer* layer = exchange.about.layer;
  if (layer == nullptr || !keeps_rounding(*layer)) return kernel::encode(to, floats(values), out, value_count);
  std::byte* const residual = exchange.kept.memory_of(kept_count(*layer)).data() + chunk.offset_bytes;
  kernel::encode_with_feedback(to, floats(values), floats(residual), out, value_count);
}

}  // namespace

std::span<const std::byte> encode_chunk(Exchange& exchange, const Chunk& chunk, const Pieces& pieces,
                                        const Links& links) {
  const Unit& unit = exchange.unit();
  const std::size_t wire_bytes = unit.bytes_as(unit.wire_dtype, chunk.size_bytes);
  const std::span<std::byte> result = exchange.progress.result;
  const bool in_place = pieces.size() == 1 && !result.empty() && fits_both(exchange, chunk) &&
                        pieces[0].data() == result.data() + chunk.offset_bytes;
  if (in_place) {
    std::byte* const memory = result.data() + chunk.offset_bytes;
    encode_values(exchange, chunk, memory, memory);
    return {memory, wire_bytes};
  }
  const std::span<std::byte> out = pooled(exchange, wire_bytes, links);
  if (pieces.size() == 1) {
    encode_values(exchange, chunk, pieces[0].data(), out.data());
    return out;
  }
  Buffer together = links.pool->take(chunk.size_bytes);
  copy_pieces(pieces, together.data());
  encode_values(exchange, chunk, together.data(), out.data());
  links.pool->give_back(std::move(together));
  return out;
}

std::span<std::byte> place_for_encoded(Exchange& exchange, const Chunk& chunk, const Links& links) {
  const std::size_t result_bytes = exchange.unit().bytes_as(exchange.result_dtype(), chunk.size_bytes);
  if (!fits_both(exchange, chunk)) return pooled(exchange, result_bytes, links);
  return exchange.progress.result.subspan(chunk.offset_bytes + chunk.size_bytes - result_bytes, result_bytes);
}

void decode_chunk(const Exchange& exchange, std::span<const std::byte> encoded, std::span<std::byte> values) {
  kernel::decode(exchange.result_dtype(), encoded.data(), floats(values.data()), values.size() / sizeof(float));
}

void convert_factors(Exchange& exchange, const Links& links, NarrowFactors narrow) {
  const DType to = exchange.unit().factor_dtype;
  auto& factored = std::get<FactoredGradient>(std::get<Push>(exchange.operation).gradient);
  const bool narrows = exchange.unit().converts_factors() && factored.dtype == DType::float32;
  if (factored.dtype == to || (narrow == NarrowFactors::stay && !narrows)) return;
  const auto convert = [&](const std::byte* rows, std::size_t value_count) {
    const std::span<std::byte> out = pooled(exchange, array_bytes(to, value_count), links);
    if (factored.dtype == DType::float32) {
      kernel::encode(to, floats(rows), out.data(), value_count);
    } else if (to == DType::float32) {
      kernel::decode(factored.dtype, rows, floats(out.data()), value_count);
    } else {
      Buffer wide = links.pool->take(value_count * sizeof(float));
      kernel::decode(factored.dtype, rows, floats(wide.data()), value_count);
      kernel::encode(to, floats(wide.data()), out.data(), value_count);
      links.pool->give_back(std::move(wide));
    }
    return out.data();
  };
  for (FactorRows& rows : factored.rows) {
    rows.left = convert(rows.left, rows.count * exchange.about.rows);
    rows.right = convert(rows.right, rows.count * exchange.about.cols);
  }
  factored.dtype = to;
}

}  // namespace poseidon
