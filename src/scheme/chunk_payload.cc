#include "scheme/chunk_payload.h"

#include <algorithm>
#include <cstring>

#include "base/invariant.h"

namespace poseidon {

Pieces chunk_payload(const Exchange& exchange, const Chunk& chunk) {
  const auto* group = exchange.gradient<GroupedGradients>();
  if (group == nullptr) {
    const std::span<const std::byte> data = data_of(exchange.operation);
    if (data.empty()) return {};
    invariant(chunk.offset_bytes + chunk.size_bytes <= data.size(), "a chunk lies within its unit");
    return {data.subspan(chunk.offset_bytes, chunk.size_bytes)};
  }
  const auto& pieces = group->pieces;
  const auto& offsets = exchange.unit().offsets_bytes;
  const auto after = std::upper_bound(offsets.begin(), offsets.end(), chunk.offset_bytes);
  std::size_t piece = static_cast<std::size_t>(after - offsets.begin()) - 1;
  // The footer has no offset of its own, because it follows the last member.
  std::size_t skip_bytes = chunk.offset_bytes - offsets[piece];
  if (skip_bytes >= pieces[piece].size()) skip_bytes -= pieces[piece++].size();
  Pieces payload;
  for (std::size_t left_bytes = chunk.size_bytes; left_bytes > 0; ++piece) {
    invariant(piece < pieces.size(), "the pieces of a group are as long as its unit");
    const auto rest = pieces[piece].subspan(skip_bytes);
    skip_bytes = 0;
    if (rest.empty()) continue;
    payload.push_back(rest.first(std::min(rest.size(), left_bytes)));
    left_bytes -= payload.back().size();
  }
  return payload;
}

std::span<std::byte> place_of(const Exchange& exchange, const Chunk& chunk) {
  invariant(chunk.offset_bytes + chunk.size_bytes <= exchange.progress.result.size(), "a chunk lies within its result");
  return exchange.progress.result.subspan(chunk.offset_bytes, chunk.size_bytes);
}

void copy_pieces(const Pieces& pieces, std::byte* out) {
  for (const auto& piece : pieces) {
    std::memcpy(out, piece.data(), piece.size());
    out += piece.size();
  }
}

std::span<const std::byte> in_one_piece(Exchange& exchange, const Pieces& pieces, const Links& links) {
  if (pieces.size() == 1) return pieces.front();
  std::size_t size_bytes = 0;
  for (const auto& piece : pieces) size_bytes += piece.size();
  const std::span<std::byte> out = exchange.progress.converted.emplace_back(links.pool->take(size_bytes)).span();
  copy_pieces(pieces, out.data());
  return out;
}

}  // namespace poseidon
