/* Which vector instructions the CPU that runs this has (found at run time, not at build time). */
#ifndef EVEN_DEVICE_CPU_SIMD_H
#define EVEN_DEVICE_CPU_SIMD_H

#include <stdbool.h>
#include <stddef.h>

/* "AVX2 FMA AVX-512F": those that matter for training, widest last; "none" without any. Returns `out`. */
const char *even_cpu_simd_words(char *out, size_t size);
bool even_cpu_has_avx2(void); /* with FMA; false on other architectures */
bool even_cpu_has_avx512(void);
/* Whether bf16 products run in hardware (AVX512-BF16, AMX-BF16, Arm BF16). */
bool even_cpu_has_bf16(void);

#endif
