/* A C interface to the exchanges of one Client (client.h), for plugins that are compiled against a framework on the
 * user's machine. Such a plugin gets the address of a PoseidonExchange from Python (`_core.Client.c_exchange`), and
 * links against nothing of Poseidon. This header is C and includes nothing but <stdint.h>.
 *
 * Threads: every function may be called from any thread. None needs or takes Python's lock. Only `wait` blocks.
 * Lifetime: the struct is valid as long as the Python object of the client exists.
 * Errors: 0 is ok. For everything else `error` holds a text that ends with a zero byte, cut to `error_size` bytes. */
#ifndef POSEIDON_C_EXCHANGE_H
#define POSEIDON_C_EXCHANGE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Rises when the struct or the meaning of a function changes. A plugin refuses any other version. */
#define POSEIDON_EXCHANGE_VERSION 2
#define POSEIDON_NOT_FACTORABLE UINT64_MAX

/* What looks at a model's parameters when a step begins, in steps that run without Python. adapter/native_look.py owns
 * the struct. Steps of one model begin one after the other. `look` takes Python's lock and may block. It gets the
 * number of steps that have begun before and the memory of the parameters. It returns the number of the step at which
 * it is to be called again, or -1 and a text that says what is wrong. */
typedef struct PoseidonLook {
  int64_t begun; /* steps so far */
  int64_t next;
  int64_t (*look)(int64_t begun, const void* const* arrays, char* error, uint64_t error_size);
  uint64_t count; /* of the parameters */
  const uint64_t* sizes_bytes;
} PoseidonLook;

typedef struct PoseidonExchange {
  uint32_t version;
  uint32_t reserved;
  void* client; /* the first argument of all functions */

  /* Client::start: the sum over the workers, divided by `divisor`, replaces the `size_bytes` bytes at `data`.
   * `factor_count` is the K that the gradient would have as factors, or POSEIDON_NOT_FACTORABLE. */
  int32_t (*start)(void* client, uint32_t layer, void* data, uint64_t size_bytes, uint32_t divisor,
                   uint64_t factor_count, char* error, uint64_t error_size);
  /* Client::start_absent: takes part without a contribution. `destination` stays as it is if nobody contributed. */
  int32_t (*start_absent)(void* client, uint32_t layer, void* destination, uint64_t size_bytes, uint32_t divisor,
                          char* error, uint64_t error_size);
  /* Client::start_factors: of a float32 layer. `left` is count x rows, `right` count x cols, both row-major.
   * `destination` (rows x cols) receives the sum of transpose(left) x right over the workers, divided by `divisor`. */
  int32_t (*start_factors)(void* client, uint32_t layer, const void* left, const void* right, uint64_t count,
                           void* destination, uint64_t size_bytes, uint32_t divisor, char* error, uint64_t error_size);
  /* Whether the layer's next exchange takes factors (1) or not (0). It is the same on every rank. */
  int32_t (*takes_factors)(void* client, uint32_t layer);
  /* Client::wait: afterwards, also after an error, nothing reads or writes the memory of the layer's exchange. */
  int32_t (*wait)(void* client, uint32_t layer, char* error, uint64_t error_size);
  /* Client::done: whether no exchange of the layer is under way (1), as after a failure. */
  int32_t (*done)(void* client, uint32_t layer);
  /* The look of this number (`_core.Client.add_look`), valid until it is removed. NULL if there is none. A compiled
   * step knows its look by the number, because the program may be stored and loaded by another process. */
  PoseidonLook* (*find_look)(void* client, int64_t number);
} PoseidonExchange;

/* A step begins with these parameters. Returns 0, or -1 and a text. */
static inline int32_t poseidon_begin_step(PoseidonLook* of, const void* const* arrays, const uint64_t* sizes_bytes,
                                          uint64_t count, char* error, uint64_t error_size) {
  static const char other[] = "this step was compiled for another model: compile it again in this job";
  int is_other = count != of->count;
  for (uint64_t i = 0; !is_other && i < count; ++i) is_other = sizes_bytes[i] != of->sizes_bytes[i];
  if (is_other) {
    for (uint64_t i = 0; i < error_size; ++i) {
      error[i] = i + 1 < error_size && i < sizeof other ? other[i] : 0;
      if (error[i] == 0) break;
    }
    return -1;
  }
  const int64_t begun = of->begun++;
  if (begun < of->next) return 0;
  of->next = of->look(begun, arrays, error, error_size);
  return of->next < 0 ? -1 : 0;
}

#ifdef __cplusplus
}
#endif

#endif
