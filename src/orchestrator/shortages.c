/* Halves the samples of ranks that ran out of memory. */
#include "orchestrator/shortages.h"

#include <stdio.h>
#include <string.h>

enum { MOST_PARTS = 1 << 16 };

static void name_place(const char *host, const char *device, char out[EVEN_SHORTAGES_PLACE]) {
  (void)snprintf(out, EVEN_SHORTAGES_PLACE, "%s %s", host, device);
}

static size_t find(const even_shortages *list, const char *place) {
  size_t i = 0;
  while (i < list->count && strcmp(list->items[i].place, place) != 0) {
    i++;
  }
  return i;
}

/* It had no more than it was allowed: what is known of a step may be of an attempt before. */
static bool had_less(const even_shortage *one, uint32_t samples, uint32_t batch) {
  return one->most > 0 && (samples == 0 || (uint64_t)samples * one->batch > (uint64_t)one->most * batch);
}

void even_shortages_note(even_shortages *list, const char *host, const char *device, uint32_t samples, uint32_t batch,
                         const even_shortage **out) {
  char place[EVEN_SHORTAGES_PLACE];
  *out = NULL;
  name_place(host, device, place);
  size_t at = find(list, place);
  if (at == EVEN_SHORTAGES_MOST) {
    return;
  }
  even_shortage *one = &list->items[at];
  if (at == list->count) {
    *one = (even_shortage){.part = 1};
    memcpy(one->place, place, sizeof place);
  }
  bool less = had_less(one, samples, batch);
  uint32_t held = less ? one->most : samples;
  if (held == 1 || (held == 0 && one->part > MOST_PARTS)) {
    return;
  }
  one->most = held / 2;
  one->batch = less ? one->batch : batch;
  one->part = held == 0 ? one->part * 2 : one->part;
  list->count = at == list->count ? at + 1 : list->count;
  *out = one;
}

void even_shortages_add(const even_shortages *list, const char *host, const char *device, size_t rank, even_text *out) {
  char place[EVEN_SHORTAGES_PLACE];
  name_place(host, device, place);
  size_t at = find(list, place);
  if (at == list->count) {
    return;
  }
  const even_shortage *one = &list->items[at];
  const char *comma = out->length > 0 ? "," : "";
  if (one->most > 0) {
    even_text_format(out, "%s%zu:%u/%u", comma, rank, one->most, one->batch);
  } else {
    even_text_format(out, "%s%zu:/%u", comma, rank, one->part);
  }
}
