/* XXH3 for x86-64 with AVX2. */
#define EVEN_XXH3_TABLE even_xxh3_avx2
#define EVEN_XXH3_NAME "avx2"
#include "checkpoint/xxh3_body.h"
