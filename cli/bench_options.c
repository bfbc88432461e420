/* What `evenstep bench comm` is asked to measure. */
#include "base/fail.h"
#include "base/nearest.h"
#include "cli/bench_comm.h"

#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static const uint64_t LARGEST = UINT64_C(1) << 30;

static bool parse_size(const char *text, size_t length, uint64_t *out) {
  static const char units[] = "KMG";
  char word[24];
  char *end = NULL;
  if (length == 0 || length >= sizeof word || text[0] < '0' || text[0] > '9') {
    return false;
  }
  memcpy(word, text, length);
  word[length] = '\0';
  errno = 0;
  unsigned long long value = strtoull(word, &end, 10);
  const char *unit = *end == '\0' ? NULL : strchr(units, *end);
  if (errno != 0 || value > LARGEST || (*end != '\0' && (unit == NULL || end[1] != '\0'))) {
    return false;
  }
  *out = unit == NULL ? value : value << (10 * (unit - units + 1));
  return *out >= 4 && *out <= LARGEST;
}

even_status even_bench_sizes(const char *text, even_text *out) {
  const char *at = text;
  for (;;) {
    size_t length = strcspn(at, ",");
    uint64_t size = 0;
    if (!parse_size(at, length, &size)) {
      (void)even_fail(EVEN_ERR_USAGE, "bench comm: \"%.*s\" in --sizes is no size of 4 bytes to 1 GiB", (int)length,
                      at);
      return even_error_fix("give bytes, or K, M, G: --sizes 1K,64K,16M");
    }
    even_text_format(out, "%s%" PRIu64, at == text ? "" : ",", size);
    if (at[length] == '\0') {
      return even_text_status(out);
    }
    at += length + 1;
  }
}

even_status even_bench_collectives(const char *text) {
  static const char *const names[] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send"};
  enum { COUNT = sizeof names / sizeof names[0] };
  const char *at = text;
  for (;;) {
    size_t length = strcspn(at, ",");
    char word[32];
    bool known = false;
    (void)snprintf(word, sizeof word, "%.*s", (int)(length < sizeof word ? length : sizeof word - 1), at);
    for (size_t i = 0; i < COUNT; i++) {
      known = known || strcmp(word, names[i]) == 0;
    }
    if (!known) {
      const char *nearest = even_nearest(word, names, COUNT);
      (void)even_fail(EVEN_ERR_USAGE, "bench comm: \"%s\" is no collective that is measured", word);
      return even_error_fix("%s%s%sall_reduce, reduce_scatter, all_gather, broadcast, all_to_all, send",
                            nearest == NULL ? "" : "did you mean ", nearest == NULL ? "" : nearest,
                            nearest == NULL ? "" : "? There are ");
    }
    if (at[length] == '\0') {
      return EVEN_OK;
    }
    at += length + 1;
  }
}
