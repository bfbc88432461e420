/* XXH3 for any processor (SSE2 on x86-64, NEON on aarch64), and which is the best here. */
#define EVEN_XXH3_TABLE even_xxh3_portable
#define EVEN_XXH3_NAME "portable"
#include "checkpoint/xxh3_body.h"

#include <string.h>

const even_xxh3 *even_xxh3_named(const char *name) {
#if defined(__x86_64__)
  if (strcmp(name, "avx512") == 0 && __builtin_cpu_supports("avx512f")) {
    return &even_xxh3_avx512;
  }
  if (strcmp(name, "avx2") == 0 && __builtin_cpu_supports("avx2")) {
    return &even_xxh3_avx2;
  }
#endif
  return strcmp(name, "portable") == 0 ? &even_xxh3_portable : NULL;
}

const even_xxh3 *even_xxh3_best(void) {
  static const char *const order[] = {"avx512", "avx2"};
  for (size_t i = 0; i < sizeof order / sizeof order[0]; i++) {
    const even_xxh3 *found = even_xxh3_named(order[i]);
    if (found != NULL) {
      return found;
    }
  }
  return &even_xxh3_portable;
}
