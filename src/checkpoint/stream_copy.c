/* Non-temporal stores of SSE2; elsewhere memcpy. */
#include "checkpoint/stream_copy.h"

#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>

enum { LINE = 64, LEAST = 4096 };

void even_stream_copy(void *to, const void *from, size_t bytes) {
  char *out = to;
  const char *in = from;
  if (bytes < LEAST) {
    memcpy(out, in, bytes);
    return;
  }
  size_t head = (LINE - (uintptr_t)out % LINE) % LINE;
  memcpy(out, in, head);
  size_t at = head;
  for (; at + LINE <= bytes; at += LINE) {
    const __m128i a = _mm_loadu_si128((const __m128i *)(const void *)(in + at));
    const __m128i b = _mm_loadu_si128((const __m128i *)(const void *)(in + at + 16));
    const __m128i c = _mm_loadu_si128((const __m128i *)(const void *)(in + at + 32));
    const __m128i d = _mm_loadu_si128((const __m128i *)(const void *)(in + at + 48));
    _mm_stream_si128((__m128i *)(void *)(out + at), a);
    _mm_stream_si128((__m128i *)(void *)(out + at + 16), b);
    _mm_stream_si128((__m128i *)(void *)(out + at + 32), c);
    _mm_stream_si128((__m128i *)(void *)(out + at + 48), d);
  }
  _mm_sfence(); /* before anybody is told that it is there */
  memcpy(out + at, in + at, bytes - at);
}

#else

void even_stream_copy(void *to, const void *from, size_t bytes) {
  memcpy(to, from, bytes);
}

#endif
