/* Made once for each set of vectors, under the name EVEN_XXH3_TABLE: xxHash's header takes those that the compiler is
 * allowed. */
#include "checkpoint/xxh3.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

static void update(void *state, const void *data, size_t bytes) {
  (void)XXH3_64bits_update(state, data, bytes);
}

static uint64_t whole(const void *data, size_t bytes) {
  return XXH3_64bits(data, bytes);
}

const even_xxh3 EVEN_XXH3_TABLE = {.name = EVEN_XXH3_NAME, .update = update, .whole = whole};
