/* XXH3 for x86-64 with AVX-512 (F). */
#define EVEN_XXH3_TABLE even_xxh3_avx512
#define EVEN_XXH3_NAME "avx512"
#include "checkpoint/xxh3_body.h"
