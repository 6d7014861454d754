#include "scheme/value_base.h"

#include <cstring>

#include "base/invariant.h"
#include "kernel/lossless.h"
#include "scheme/chunk_payload.h"

namespace poseidon {

namespace {

/// Whether servers keep what the exchange is about, and the result goes where the value before it lies.
bool receives_update(const Exchange& exchange) {
  const Push& push = *exchange.push();
  const auto result = exchange.progress.result;
  return exchange.about.stored && push.wants_result && !result.empty() &&
         result.data() != data_of(exchange.operation).data() && exchange.result_dtype() == exchange.unit().dtype;
}

/// The base that was named for the chunk; 0 if none was.
std::uint64_t base_of(const Exchange& exchange, std::uint32_t chunk) {
  const auto& bases = exchange.progress.awaited().bases;
  return chunk < bases.size() ? bases[chunk] : 0;
}

}  // namespace

void name_base(Exchange& exchange, const Links& links, wire::Contribution& push) {
  const DType dtype = exchange.unit().dtype;
  if (!dtype_is_floating(dtype) || wire::coding_of(dtype) == Coding::none || !receives_update(exchange)) return;
  const Chunk& chunk = exchange.unit().chunks[push.chunk];
  if (!links.flow_of(chunk, exchange.priority.priority_class).codes(chunk.size_bytes)) return;
  auto& bases = exchange.progress.awaited().bases;
  bases.resize(exchange.unit().chunks.size());
  push.base = bases[chunk.index] = wire::base_digest(place_of(exchange, chunk));
}

bool is_difference(const wire::Header& answer) {
  return answer.kind == wire::Kind::result && wire::StepResult::read(answer).difference;
}

bool has_base(const Exchange& exchange, const wire::Header& answer) {
  return base_of(exchange, answer.chunk) != 0 && answer.payload_bytes > 0;
}

bool take_difference(const Exchange& exchange, const wire::Header& answer, std::span<std::byte> difference) {
  const std::span<std::byte> place = place_of(exchange, exchange.unit().chunks[answer.chunk]);
  invariant(place.size() == difference.size(), "a difference has the size of its chunk");
  const std::size_t width = value_bytes(wire::coding_of(exchange.unit().dtype));
  kernel::add_difference(difference.data(), place.data(), difference.data(), place.size() / width, width);
  // What was read above was the base, even if another process has this memory, too, and writes the new value there.
  if (wire::base_digest(place) != base_of(exchange, answer.chunk)) return false;
  std::memcpy(place.data(), difference.data(), place.size());
  return true;
}

}  // namespace poseidon
