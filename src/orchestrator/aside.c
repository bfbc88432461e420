/* Counts in how many attempts in a row the rank of a place failed first. */
#include "orchestrator/aside.h"

#include <stdio.h>
#include <string.h>

static const uint64_t first_ns = 60000000000u;
static const uint64_t longest_ns = (uint64_t)EVEN_ASIDE_LONGEST_SECONDS * 1000000000u;

void even_aside_close(even_aside *aside) {
  even_text_free(&aside->past.resume);
  even_text_free(&aside->past.foreign);
  even_text_free(&aside->past.lineage);
  even_text_free(&aside->past.began);
  aside->past = (even_elastic_past){.kept = false};
}

static bool is_it(const even_aside_place *one, const char *host, size_t place) {
  return one->place == place && strcmp(one->host, host) == 0;
}

static even_aside_place *find(even_aside *aside, const char *host, size_t place) {
  for (size_t i = 0; i < aside->count; i++) {
    if (is_it(&aside->items[i], host, place)) {
      return &aside->items[i];
    }
  }
  return NULL;
}

bool even_aside_has(const even_aside *aside, const char *host, size_t place) {
  for (size_t i = 0; i < aside->count; i++) {
    if (is_it(&aside->items[i], host, place)) {
      return aside->items[i].until_ns != 0;
    }
  }
  return false;
}

size_t even_aside_place_of(const even_aside *aside, const char *host, size_t rank) {
  size_t place = 0;
  for (size_t passed = 0;; place++) {
    if (even_aside_has(aside, host, place)) {
      continue;
    }
    if (passed++ == rank) {
      return place;
    }
  }
}

static uint64_t pause_of(unsigned times) {
  uint64_t pause = first_ns;
  for (unsigned i = 1; i < times && pause < longest_ns; i++) {
    pause *= 2;
  }
  return pause < longest_ns ? pause : longest_ns;
}

void even_aside_failed(even_aside *aside, const char *host, int rank, const char *device, size_t ranks, size_t least,
                       uint64_t now_ns, const even_aside_place **out) {
  *out = NULL;
  if (rank < 0) {
    aside->failed = 0;
    return;
  }
  even_aside_place its = {.place = even_aside_place_of(aside, host, (size_t)rank)};
  (void)snprintf(its.host, sizeof its.host, "%s", host);
  (void)snprintf(its.device, sizeof its.device, "%s", device);
  aside->failed = aside->failed > 0 && is_it(&aside->last, host, its.place) ? aside->failed + 1 : 1;
  aside->last = its;
  even_aside_place *one = find(aside, host, its.place);
  if (aside->failed < EVEN_ASIDE_ATTEMPTS || ranks < 2 || ranks <= least ||
      (one == NULL && aside->count == EVEN_ASIDE_MOST)) {
    return;
  }
  if (one == NULL) {
    one = &aside->items[aside->count++];
    *one = its;
  }
  one->until_ns = now_ns + pause_of(++one->times);
  aside->failed = 0;
  aside->changed = true;
  *out = one;
}

const even_aside_place *even_aside_return(even_aside *aside, uint64_t now_ns) {
  for (size_t i = 0; i < aside->count; i++) {
    if (aside->items[i].until_ns != 0 && now_ns >= aside->items[i].until_ns) {
      aside->items[i].until_ns = 0;
      aside->changed = true;
      return &aside->items[i];
    }
  }
  return NULL;
}

bool even_aside_any(const even_aside *aside) {
  bool any = false;
  for (size_t i = 0; !any && i < aside->count; i++) {
    any = aside->items[i].until_ns != 0;
  }
  return any;
}

void even_aside_leave(const even_aside *aside, even_aside_rests *out) {
  out->count = aside == NULL ? 0 : aside->count;
  out->failed = aside == NULL ? 0 : aside->failed;
  if (aside != NULL) {
    memcpy(out->items, aside->items, aside->count * sizeof *aside->items);
    out->last = aside->last;
  }
}

void even_aside_take(const even_aside_rests *from, even_aside *out) {
  out->count = from->count <= EVEN_ASIDE_MOST ? from->count : 0;
  memcpy(out->items, from->items, out->count * sizeof *out->items);
  out->last = from->last;
  out->failed = from->failed;
}
