// Bindings of poseidon/plugin.h.
#include "poseidon/plugin.h"

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "poseidon/client.h"

namespace poseidon::bindings {

namespace {

static_assert(POSEIDON_NOT_FACTORABLE == kNotFactorable);

Client& client_of(void* client) { return *static_cast<Client*>(client); }

std::int32_t told(const Status& status, char* text, std::size_t text_bytes) {
  if (status.ok()) return 0;
  const std::string name(error_code_name(status.code()));
  std::snprintf(text, text_bytes, "%s: %s", name.c_str(), status.message().c_str());
  return static_cast<std::int32_t>(status.code());
}

std::int32_t start(void* client, std::uint32_t layer, void* data, std::size_t size_bytes, std::uint32_t divisor,
                   std::uint64_t factor_count, char* text, std::size_t text_bytes) {
  const std::span bytes(static_cast<std::byte*>(data), size_bytes);
  return told(client_of(client).start(layer, bytes, divisor, factor_count), text, text_bytes);
}

std::int32_t start_factors(void* client, std::uint32_t layer, std::uint8_t dtype, const PoseidonFactorRows* segments,
                           std::size_t segment_count, void* destination, std::size_t size_bytes, std::uint32_t divisor,
                           char* text, std::size_t text_bytes) {
  std::vector<FactorRows> rows;
  for (const auto& given : std::span(segments, segment_count))
    rows.push_back(
        {static_cast<const std::byte*>(given.left), static_cast<const std::byte*>(given.right), given.count});
  const std::span bytes(static_cast<std::byte*>(destination), size_bytes);
  return told(client_of(client).start_factors(layer, static_cast<DType>(dtype), std::move(rows), bytes, divisor, false),
              text, text_bytes);
}

std::int32_t wait(void* client, std::uint32_t layer, char* text, std::size_t text_bytes) {
  return told(client_of(client).wait(layer, [] { return true; }), text, text_bytes);
}

}  // namespace

PoseidonPluginClient plugin_client(Client& client) {
  return {.client = &client, .start = start, .start_factors = start_factors, .wait = wait};
}

}  // namespace poseidon::bindings
