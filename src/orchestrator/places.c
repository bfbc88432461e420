/* Shares out the ranks of a host that is drained. */
#include "orchestrator/places.h"

#include "base/fail.h"

static size_t leaving(const even_places_host *hosts, size_t count) {
  size_t ranks = 0;
  for (size_t i = 0; i < count; i++) {
    ranks += hosts[i].leaves ? hosts[i].ranks : 0;
  }
  return ranks;
}

static even_status check(const even_places_host *hosts, size_t count, size_t ranks, bool *any) {
  size_t asked = 0;
  *any = false;
  for (size_t i = 0; i < count; i++) {
    const even_places_host *host = &hosts[i];
    if (host->named && host->leaves) {
      (void)even_fail(EVEN_ERR_USAGE, "host %s is to be drained, and to take ranks", host->name);
      return even_error_fix("name other hosts with --to");
    }
    *any = *any || host->named;
    asked += host->named ? host->wish : 0;
  }
  if (asked > ranks) {
    (void)even_fail(EVEN_ERR_USAGE, "--to has places for %zu ranks, and %zu leave%s", asked, ranks,
                    ranks == 1 ? "s" : "");
    return even_error_fix("give fewer: a job does not grow when a host is drained (evenstep join lets it)");
  }
  return EVEN_OK;
}

/* What the user said of each, the rest evenly among the others that he named, the first of them with one more. */
static size_t share_among_named(even_places_host *hosts, size_t count, size_t ranks) {
  size_t left = ranks;
  size_t open = 0;
  for (size_t i = 0; i < count; i++) {
    if (hosts[i].named) {
      hosts[i].gets = hosts[i].wish;
      left -= hosts[i].wish;
      open += hosts[i].wish == 0;
    }
  }
  for (size_t i = 0; i < count && open > 0; i++) {
    if (hosts[i].named && hosts[i].wish == 0) {
      hosts[i].gets = (left + open - 1) / open;
      left -= hosts[i].gets;
      open--;
    }
  }
  return ranks - left;
}

static size_t room_of(const even_places_host *host) {
  size_t taken = host->ranks + host->gets;
  return host->leaves || host->places <= taken ? 0 : host->places - taken;
}

static size_t share_among_all(even_places_host *hosts, size_t count, size_t ranks) {
  size_t moved = 0;
  while (moved < ranks) {
    even_places_host *best = NULL;
    for (size_t i = 0; i < count; i++) {
      best = room_of(&hosts[i]) > (best == NULL ? 0 : room_of(best)) ? &hosts[i] : best;
    }
    if (best == NULL) {
      break;
    }
    best->gets++;
    moved++;
  }
  return moved;
}

even_status even_places_share(even_places_host *hosts, size_t count, size_t *moved) {
  size_t ranks = leaving(hosts, count);
  bool any = false;
  *moved = 0;
  for (size_t i = 0; i < count; i++) {
    hosts[i].gets = 0;
  }
  EVEN_TRY(check(hosts, count, ranks, &any));
  *moved = any ? share_among_named(hosts, count, ranks) : share_among_all(hosts, count, ranks);
  return EVEN_OK;
}
