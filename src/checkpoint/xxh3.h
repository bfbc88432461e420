/* XXH3 (64 bits) by the widest vectors that the processor has. The sums are the same by all, and a state may go from
 * one to another: its form does not depend on them. */
#ifndef EVEN_CHECKPOINT_XXH3_H
#define EVEN_CHECKPOINT_XXH3_H

#include <stddef.h>
#include <stdint.h>

typedef struct even_xxh3 {
  const char *name;
  void (*update)(void *state, const void *data, size_t bytes); /* of an XXH3_state_t */
  uint64_t (*whole)(const void *data, size_t bytes);
} even_xxh3;

extern const even_xxh3 even_xxh3_portable;
extern const even_xxh3 even_xxh3_avx2;
extern const even_xxh3 even_xxh3_avx512;

/* "portable", "avx2", "avx512"; NULL: not on this processor. Any thread. */
const even_xxh3 *even_xxh3_named(const char *name);
const even_xxh3 *even_xxh3_best(void);

#endif
