/* What plugins of frameworks call a client by: C function pointers. A plugin is compiled against this header and the
 * framework's own, and links nothing of Poseidon. `_core.Client.plugin_client` is a capsule of this name around a
 * PoseidonPluginClient, which lives as long as the Client does. A change of the struct changes the name. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define POSEIDON_PLUGIN_CLIENT "poseidon.plugin_client.1"

/* Says that a dense gradient is not known to be a sum of few outer products (kNotFactorable). */
#define POSEIDON_NOT_FACTORABLE (~(uint64_t)0)

/* FactorRows of poseidon/client.h. */
typedef struct PoseidonFactorRows {
  const void* left;
  const void* right;
  size_t count;
} PoseidonFactorRows;

/* The functions are Client's of the same names (poseidon/client.h), with the same contracts. Their first argument is
 * `client`. Any thread may call them, and none needs the GIL. Each returns 0 (ok) or an ErrorCode, and then writes its
 * name and message, cut to `text_bytes` and ended by a zero. */
typedef struct PoseidonPluginClient {
  void* client;
  int32_t (*start)(void* client, uint32_t layer, void* data, size_t size_bytes, uint32_t divisor, uint64_t factor_count,
                   char* text, size_t text_bytes);
  /* `dtype`: a DType of poseidon/dtype.h. The result, the product, is written to `destination`. */
  int32_t (*start_factors)(void* client, uint32_t layer, uint8_t dtype, const PoseidonFactorRows* segments,
                           size_t segment_count, void* destination, size_t size_bytes, uint32_t divisor, char* text,
                           size_t text_bytes);
  /* Blocks, up to the timeout. */
  int32_t (*wait)(void* client, uint32_t layer, char* text, size_t text_bytes);
} PoseidonPluginClient;
