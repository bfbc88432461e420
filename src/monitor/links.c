/* A cost a byte for each way from one host to another, and what was usual. */
#include "monitor/links.h"

#include "base/alloc.h"
#include "base/fail.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { LEAST_TRANSFERS = 6 };
static const double USUAL = 1.5;
static const double ENDS_PART = 0.25; /* of what a slow link's factor is above 1 */
/* What is usual follows what is less within some of so many looks, and what is a little more within some of so many:
 * what is much more is not usual, however long it lasts. */
static const double LESS_LOOKS = 4;
static const double MORE_LOOKS = 32;

/* From one host to another. */
typedef struct way {
  uint64_t transfers; /* since the last look with figures */
  uint64_t ns;
  uint64_t sum; /* of their bytes */
  int looks;
  double usual; /* ns a byte; 0: not known */
  double now;   /* the same */
  double bytes; /* of a transfer, now */
} way;

struct even_links {
  int hosts;
  uint32_t mark[EVEN_LINK_HOSTS];
  int rank[EVEN_LINK_HOSTS]; /* the first there that told anything */
  way *ways;                 /* [from * EVEN_LINK_HOSTS + to] */
  int suspect;               /* host; -1: none */
  int looks;                 /* in a row in which it was; once told, in which it was not */
  bool told;
  even_link_news news;
  double begins; /* slow from this factor on, */
  int must_look; /* in so many looks in a row */
};

even_status even_links_open(even_links **out) {
  even_links *links = NULL;
  *out = NULL;
  EVEN_TRY(EVEN_NEW(&links));
  even_status status = EVEN_NEW_ARRAY(&links->ways, (size_t)EVEN_LINK_HOSTS * EVEN_LINK_HOSTS);
  if (status != EVEN_OK) {
    even_free(links);
    return status;
  }
  links->suspect = -1;
  even_links_limit(links, 0, 0);
  *out = links;
  return EVEN_OK;
}

void even_links_limit(even_links *links, double begins, double seconds) {
  links->begins = begins > 0 ? begins : EVEN_LINK_BEGINS;
  links->must_look = seconds > 0 ? (int)ceil(seconds) : EVEN_LINK_LOOKS;
}

void even_links_close(even_links *links) {
  if (links != NULL) {
    even_free(links->ways);
    even_free(links);
  }
}

void even_links_forget(even_links *links) {
  way *ways = links->ways;
  memset(ways, 0, (size_t)EVEN_LINK_HOSTS * EVEN_LINK_HOSTS * sizeof *ways);
  *links = (even_links){.ways = ways, .suspect = -1, .begins = links->begins, .must_look = links->must_look};
}

static way *way_of(const even_links *links, int from, int to) {
  return &links->ways[from * EVEN_LINK_HOSTS + to];
}

/* -1: there is no room for it. */
static int host_of(even_links *links, uint32_t mark) {
  for (int host = 0; host < links->hosts; host++) {
    if (links->mark[host] == mark) {
      return host;
    }
  }
  if (links->hosts == EVEN_LINK_HOSTS) {
    return -1;
  }
  links->mark[links->hosts] = mark;
  links->rank[links->hosts] = -1;
  return links->hosts++;
}

void even_links_take(even_links *links, int rank, const even_leg_record *record) {
  int own = host_of(links, record->own);
  int peer = host_of(links, record->peer);
  if (own < 0 || peer < 0 || own == peer) {
    return;
  }
  links->rank[own] = links->rank[own] < 0 || rank < links->rank[own] ? rank : links->rank[own];
  way *at = way_of(links, peer, own);
  at->transfers += record->transfers;
  at->ns += record->ns;
  at->sum += record->bytes;
}

/* ---- one way ---- */

static double ends_below(const even_links *links) {
  return 1 + ENDS_PART * (links->begins - 1);
}

static void learn(const even_links *links, way *at) {
  at->looks++;
  if (at->looks == 1) {
    return; /* connections were made, memory was touched first */
  }
  if (at->usual == 0 || (at->looks <= EVEN_LINK_LEARNS && at->now < at->usual)) {
    at->usual = at->now;
  } else if (at->now < at->usual) {
    at->usual += (at->now - at->usual) / LESS_LOOKS;
  } else if (at->now < fmin(USUAL, ends_below(links)) * at->usual) {
    at->usual += (at->now - at->usual) / MORE_LOOKS;
  }
}

/* Whether there were enough transfers since the last time. */
static bool settle(const even_links *links, way *at) {
  if (at->transfers < LEAST_TRANSFERS || at->sum == 0) {
    return false;
  }
  at->bytes = (double)at->sum / (double)at->transfers;
  at->now = (double)at->ns / (double)at->sum;
  at->transfers = at->ns = at->sum = 0;
  learn(links, at);
  return true;
}

/* 1 where that is not known. */
static double factor_of(const way *at) {
  return at->looks >= EVEN_LINK_LEARNS && at->usual > 0 ? at->now / at->usual : 1;
}

/* ---- the hosts ---- */

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a;
  double y = *(const double *)b;
  return x < y ? -1 : x > y;
}

/* The lower median of its ways in one direction: of two the other end of one may be the slow one. */
static double direction(const even_links *links, int host, bool out) {
  double factors[EVEN_LINK_HOSTS];
  size_t count = 0;
  for (int other = 0; other < links->hosts; other++) {
    const way *at = out ? way_of(links, host, other) : way_of(links, other, host);
    if (other != host && at->looks > 0) {
      factors[count++] = factor_of(at);
    }
  }
  qsort(factors, count, sizeof factors[0], ascending);
  return count == 0 ? 1 : factors[(count - 1) / 2];
}

static double host_factor(const even_links *links, int host) {
  return fmax(direction(links, host, true), direction(links, host, false));
}

/* The slowest of its ways, for the words. */
static const way *worst_way(const even_links *links, int host) {
  const way *worst = NULL;
  for (int other = 0; other < links->hosts; other++) {
    const way *both[] = {way_of(links, host, other), way_of(links, other, host)};
    for (int i = 0; i < 2 && other != host; i++) {
      worst = worst == NULL || factor_of(both[i]) > factor_of(worst) ? both[i] : worst;
    }
  }
  return worst;
}

static bool matters(const even_links *links, int host, double least_seconds) {
  const way *at = worst_way(links, host);
  return at != NULL && (at->now - at->usual) * at->bytes >= 1e9 * least_seconds;
}

static int slowest(const even_links *links) {
  int found = -1;
  double most = 0;
  for (int host = 0; host < links->hosts; host++) {
    double factor = links->rank[host] < 0 ? 0 : host_factor(links, host);
    found = factor > most ? host : found;
    most = fmax(most, factor);
  }
  return found;
}

/* Whether the others are as slow among one another. */
static bool are_all_slow(const even_links *links, int host) {
  int slow = 0;
  int count = 0;
  for (int from = 0; from < links->hosts; from++) {
    for (int to = 0; to < links->hosts; to++) {
      if (from != to && from != host && to != host && way_of(links, from, to)->looks > 0) {
        count++;
        slow += factor_of(way_of(links, from, to)) >= ends_below(links) ? 1 : 0;
      }
    }
  }
  return 2 * slow > count;
}

static void describe(even_links *links, int host) {
  const way *at = worst_way(links, host);
  int other = links->hosts == 2 ? links->rank[1 - host] : -1;
  links->news = (even_link_news){.rank = links->rank[host],
                                 .other = other,
                                 .all = are_all_slow(links, host),
                                 .factor = fmax(links->news.factor, host_factor(links, host)),
                                 .usual_seconds = at->usual * at->bytes / 1e9,
                                 .seconds = at->now * at->bytes / 1e9};
}

/* Of two hosts either may be what is slow. */
static double excuse(const even_links *links, int host, even_links_excuse *excused, const void *context) {
  bool other = links->hosts == 2 && links->rank[1 - host] >= 0;
  return fmax(other ? excused(context, links->rank[1 - host]) : 0, excused(context, links->rank[host]));
}

static bool is_slow(const even_links *links, int host, double least_seconds, even_links_excuse *excused,
                    const void *context) {
  return host >= 0 && host_factor(links, host) >= links->begins &&
         matters(links, host, fmax(least_seconds, excuse(links, host, excused, context)));
}

static bool look_for_end(even_links *links) {
  links->looks = host_factor(links, links->suspect) < ends_below(links) ? links->looks + 1 : 0;
  if (links->looks < (links->must_look > 1 ? links->must_look - 1 : 1)) {
    return false;
  }
  links->news.over = true;
  links->told = false;
  links->suspect = -1;
  links->looks = 0;
  return true;
}

static bool look_for_beginning(even_links *links, double least_seconds, even_links_excuse *excused,
                               const void *context) {
  int host = slowest(links);
  if (!is_slow(links, host, least_seconds, excused, context)) {
    links->suspect = -1;
    links->looks = 0;
    return false;
  }
  links->looks = host == links->suspect ? links->looks + 1 : 1;
  links->suspect = host;
  if (links->looks < links->must_look) {
    return false;
  }
  links->news.factor = 0;
  describe(links, host);
  links->told = true;
  links->looks = 0;
  return true;
}

bool even_links_look(even_links *links, double least_seconds, even_links_excuse *excused, const void *context,
                     even_link_news *news) {
  bool any = false;
  for (int from = 0; from < links->hosts; from++) {
    for (int to = 0; to < links->hosts; to++) {
      any = (from != to && settle(links, way_of(links, from, to))) || any;
    }
  }
  if (!any) {
    return false;
  }
  bool changed = links->told ? look_for_end(links) : look_for_beginning(links, least_seconds, excused, context);
  *news = links->news;
  return changed;
}

bool even_links_known(const even_links *links) {
  return links->hosts > 1;
}

bool even_links_lasts(const even_links *links, even_link_news *news) {
  *news = links->news;
  return links->told;
}
