/* The reductions for x86-64 with AVX-512 (F, BW, VL, DQ). */
#include <immintrin.h>

#define EVEN_KERNEL_TABLE even_kernels_avx512
#define EVEN_KERNEL_NAME "avx512"
#define EVEN_KERNEL_LOAD_F16(to, from) \
  _mm256_storeu_ps((to), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(from))))
#define EVEN_KERNEL_STORE_F16(to, from)     \
  _mm_storeu_si128((__m128i *)(void *)(to), \
                   _mm256_cvtps_ph(_mm256_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
#include "comm/kernel_body.h"
