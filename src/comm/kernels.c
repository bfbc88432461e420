/* Which instruction set the reductions use, chosen when first asked. */
#include "comm/kernels.h"

#include <evenstep/comm.h>
#include <stdatomic.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

static _Atomic(const even_kernels *) chosen;

const even_kernels *even_kernels_named(const char *name) {
#if defined(__x86_64__)
  if (strcmp(name, "avx512") == 0 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return &even_kernels_avx512;
  }
  if (strcmp(name, "avx2") == 0 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
    return &even_kernels_avx2;
  }
#elif defined(__aarch64__)
  if (strcmp(name, "neon") == 0) {
    return &even_kernels_neon;
  }
#endif
  return strcmp(name, "portable") == 0 ? &even_kernels_portable : NULL;
}

const even_kernels *even_kernels_best(void) {
  static const char *const order[] = {"avx512", "avx2", "neon", "portable"};
  const even_kernels *kernels = atomic_load_explicit(&chosen, memory_order_acquire);
  for (size_t i = 0; kernels == NULL; i++) {
    kernels = even_kernels_named(order[i]);
  }
  atomic_store_explicit(&chosen, kernels, memory_order_release);
  return kernels;
}

void even_kernels_use(const even_kernels *kernels) {
  atomic_store_explicit(&chosen, kernels, memory_order_release);
}

const char *even_comm_simd(void) {
  return even_kernels_best()->name;
}

#if defined(__x86_64__)
void even_copy_past_caches(void *target, const void *source, size_t bytes) {
  char *to = target;
  const char *from = source;
  size_t head = (size_t)(-(uintptr_t)to) & 63u;
  if (bytes < 4096) {
    memcpy(to, from, bytes);
    return;
  }
  memcpy(to, from, head);
  size_t at = head;
  for (; at + 64 <= bytes; at += 64) {
    __m128i a = _mm_loadu_si128((const __m128i *)(const void *)(from + at));
    __m128i b = _mm_loadu_si128((const __m128i *)(const void *)(from + at + 16));
    __m128i c = _mm_loadu_si128((const __m128i *)(const void *)(from + at + 32));
    __m128i d = _mm_loadu_si128((const __m128i *)(const void *)(from + at + 48));
    _mm_stream_si128((__m128i *)(void *)(to + at), a);
    _mm_stream_si128((__m128i *)(void *)(to + at + 16), b);
    _mm_stream_si128((__m128i *)(void *)(to + at + 32), c);
    _mm_stream_si128((__m128i *)(void *)(to + at + 48), d);
  }
  _mm_sfence();
  memcpy(to + at, from + at, bytes - at);
}

void even_copy_from_core(void *target, const void *source, size_t bytes) {
  char *to = target;
  const char *from = source;
  size_t at = 0;
  for (; at + 64 <= bytes; at += 64) {
    __m128i a = _mm_loadu_si128((const __m128i *)(const void *)(from + at));
    __m128i b = _mm_loadu_si128((const __m128i *)(const void *)(from + at + 16));
    __m128i c = _mm_loadu_si128((const __m128i *)(const void *)(from + at + 32));
    __m128i d = _mm_loadu_si128((const __m128i *)(const void *)(from + at + 48));
    _mm_storeu_si128((__m128i *)(void *)(to + at), a);
    _mm_storeu_si128((__m128i *)(void *)(to + at + 16), b);
    _mm_storeu_si128((__m128i *)(void *)(to + at + 32), c);
    _mm_storeu_si128((__m128i *)(void *)(to + at + 48), d);
  }
  if (at < bytes) {
    memcpy(to + at, from + at, bytes - at);
  }
}
#else
void even_copy_from_core(void *target, const void *source, size_t bytes) {
  memcpy(target, source, bytes);
}
void even_copy_past_caches(void *target, const void *source, size_t bytes) {
  memcpy(target, source, bytes);
}
#endif
