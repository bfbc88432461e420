/* Any bytes as what ranks of other hosts say they wait in: kept within bounds, passed on as it was, and whatever circle
 * it makes up described; never a crash. */
#include "comm/waits.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define NOW_NS ((uint64_t)100 * 1000000000u)
#define OWN 5

static uint64_t number_of(uint8_t byte) {
  return byte % 8; /* so that they name one another */
}

/* What is made of numbers comes from the first bytes, so that circles come up; the rest is as it is. */
static size_t take(const uint8_t *data, size_t size, even_far_waits *out) {
  size_t bytes = size < sizeof *out ? size : sizeof *out;
  memset(out, 0xff, sizeof *out);
  memcpy(out, data, bytes);
  for (size_t i = 0; i + 4 < bytes && i < EVEN_WAITS; i++) {
    out->process = number_of(data[0]);
    out->change = number_of(data[1]);
    out->wait[i].whom[0] = number_of(data[i + 2]);
    out->wait[i].at[0] = number_of(data[i + 3]);
  }
  return bytes;
}

static void own_of(const uint8_t *data, size_t size, even_process_words *out) {
  *out = (even_process_words){.process = OWN, .change = 3, .whole_ns = NOW_NS / 2, .whole_seen_ns = NOW_NS, .waits = 1};
  out->wait[0] = (even_wait_words){.since_ns = NOW_NS / 2, .seen_ns = NOW_NS};
  even_circle_need(&out->wait[0].needs, size > 0 ? number_of(data[0]) : 1, size > 1 ? number_of(data[1]) : 1);
}

static void check(const even_far_waits *words) {
  if (words->waits > EVEN_WAITS || memchr(words->doing, '\0', sizeof words->doing) == NULL ||
      memchr(words->group, '\0', sizeof words->group) == NULL ||
      memchr(words->host, '\0', sizeof words->host) == NULL || memchr(words->site, '\0', sizeof words->site) == NULL) {
    abort();
  }
  for (uint32_t i = 0; i < words->waits; i++) {
    if (words->wait[i].whoms > EVEN_WAITS_WHOM) {
      abort();
    }
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static even_far_known far;
  even_far_waits out[EVEN_FAR_WAITS];
  even_process_words own;
  even_circle_found found;
  memset(&far, 0, sizeof far);
  own_of(data, size, &own);
  for (size_t at = 0; at < size;) {
    even_far_waits words;
    size_t step = 1 + data[at] % 16;
    (void)take(data + at, size - at, &words);
    even_waits_keep(&far, OWN, &words, NOW_NS);
    at += step < size - at ? step : size - at;
  }
  size_t told = even_waits_gather(NULL, &own, &far, NOW_NS, size, out);
  if (told < 1 || told > EVEN_FAR_WAITS || out[0].process != OWN) {
    abort();
  }
  for (size_t i = 0; i < told; i++) {
    check(&out[i]);
  }
  if (even_waits_look_for_circle(NULL, &own, &far, NOW_NS, &found) &&
      (found.members.count < 1 || found.members.count > EVEN_CIRCLE_MEMBERS || found.members.process[0] != OWN ||
       found.why.status != EVEN_ERR_MISMATCH || memchr(found.why.what, '\0', sizeof found.why.what) == NULL)) {
    abort();
  }
  memset(&found, 0xff, sizeof found);
  if (size > 0) {
    memcpy(&found, data, size < sizeof found ? size : sizeof found);
  }
  even_circle_bound_members(&found.members);
  if (found.members.count > EVEN_CIRCLE_MEMBERS) {
    abort();
  }
  return 0;
}
