/* SIMD features from cpuid (x86-64) or the auxiliary vector (aarch64). */
#include "device/cpu/simd.h"

#include <stdio.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

typedef struct feature {
  const char *word;
  bool here;
} feature;

#if defined(__x86_64__)
/* Intel SDM, CPUID leaf 7, subleaf 0, EDX. The operating system may still refuse a process the tiles. */
static bool amx_bf16(void) {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d >> 22 & 1) != 0 && (d >> 24 & 1) != 0;
}

/* these ask whether the operating system saves the registers, too */
bool even_cpu_has_avx2(void) {
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
}

bool even_cpu_has_avx512(void) {
  return __builtin_cpu_supports("avx512f") != 0;
}

bool even_cpu_has_bf16(void) {
  return __builtin_cpu_supports("avx512bf16") != 0 || amx_bf16();
}
#else
bool even_cpu_has_avx2(void) {
  return false;
}

bool even_cpu_has_avx512(void) {
  return false;
}

bool even_cpu_has_bf16(void) {
#if defined(__aarch64__)
  return (getauxval(AT_HWCAP2) >> 14 & 1) != 0; /* HWCAP2_BF16 */
#else
  return false;
#endif
}
#endif

const char *even_cpu_simd_words(char *out, size_t size) {
#if defined(__x86_64__)
  const feature features[] = {
      {"AVX", __builtin_cpu_supports("avx") != 0},
      {"FMA", __builtin_cpu_supports("fma") != 0},
      {"AVX2", __builtin_cpu_supports("avx2") != 0},
      {"AVX-512F", __builtin_cpu_supports("avx512f") != 0},
      {"AVX512-VNNI", __builtin_cpu_supports("avx512vnni") != 0},
      {"AVX512-BF16", __builtin_cpu_supports("avx512bf16") != 0},
      {"AMX-BF16", amx_bf16()},
  };
#elif defined(__aarch64__)
  const unsigned long first = getauxval(AT_HWCAP);
  const unsigned long second = getauxval(AT_HWCAP2);
  const feature features[] = {
      {"NEON", (first >> 1 & 1) != 0},  {"FP16", (first >> 10 & 1) != 0},  {"SVE", (first >> 22 & 1) != 0},
      {"SVE2", (second >> 1 & 1) != 0}, {"I8MM", (second >> 13 & 1) != 0}, {"BF16", (second >> 14 & 1) != 0},
  };
#else
  const feature features[] = {{"", false}};
#endif
  out[0] = '\0';
  for (size_t i = 0; i < sizeof features / sizeof features[0]; i++) {
    size_t used = strlen(out);
    if (features[i].here) {
      (void)snprintf(out + used, size - used, "%s%s", used > 0 ? " " : "", features[i].word);
    }
  }
  if (out[0] == '\0') {
    (void)snprintf(out, size, "none");
  }
  return out;
}
