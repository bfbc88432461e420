/* From what ranks tell of the ways between their hosts to events. */
#include "monitor/slow_links.h"

#include "monitor/lagging.h"
#include "monitor/straggler.h"
#include "os/clock.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

/* Of a step; what a transfer takes longer than usual is less than what the exchange does. */
static const double MATTERS = 0.01;
static const double LEAST_SECONDS = 200e-6;

static const char *host_of(const even_monitor *monitor, int rank) {
  return monitor->state->rank[rank].host;
}

/* "link between hosts a and b is", "link of host b is", "links between all hosts are" */
static void name(const even_monitor *monitor, const even_link_news *news, char *out, size_t bytes) {
  const char *host = host_of(monitor, news->rank);
  if (news->all) {
    (void)snprintf(out, bytes, "links between all hosts %s", news->over ? "were" : "are");
  } else if (news->other >= 0) {
    (void)snprintf(out, bytes, "link between hosts %.60s and %.60s %s", host, host_of(monitor, news->other),
                   news->over ? "was" : "is");
  } else {
    (void)snprintf(out, bytes, "link of host %.60s %s", host, news->over ? "was" : "is");
  }
}

/* What else the kernel says of the hosts at its ends: who lacks CPU time sends late, too. */
static void add_cause(const even_monitor *monitor, const even_measure *measure, const even_link_news *news, char *words,
                      size_t bytes) {
  for (int rank = 0; rank < measure->ranks; rank++) {
    even_straggler why;
    const char *host = host_of(monitor, rank);
    bool ends_there = strcmp(host, host_of(monitor, news->rank)) == 0 ||
                      (news->other >= 0 && strcmp(host, host_of(monitor, news->other)) == 0);
    even_straggler_find(measure, rank, rank, &why);
    if (ends_there && why.cause > EVEN_STRAGGLER_UNKNOWN && why.cause <= EVEN_STRAGGLER_CPU_TAKEN) {
      size_t length = strlen(words);
      (void)snprintf(words + length, bytes - length, "; meanwhile rank %d: %s%s", rank,
                     even_straggler_label(even_straggler_name(why.cause)), why.words);
      return;
    }
  }
}

static void tell(even_monitor *monitor, const even_measure *measure, const even_link_news *news) {
  even_state *state = monitor->state;
  char whose[160];
  char words[512];
  even_state_event event = {.attempt = state->attempt,
                            .rank = news->rank,
                            .step = state->last_step < 0 ? 0 : (uint32_t)state->last_step,
                            .at_ns = even_clock_ns(),
                            .event = EVEN_EVENT_LINK,
                            .value = news->over ? 0 : (int64_t)lround(100 * news->factor)};
  name(monitor, news, whose, sizeof whose);
  if (news->over) {
    (void)snprintf(words, sizeof words, "the %.120s %.1fx slower from about step %" PRIu32 " to %" PRIu32, whose,
                   news->factor, monitor->link_since, event.step);
  } else {
    monitor->link_since = event.step;
    (void)snprintf(words, sizeof words, "the %.120s %.1fx slower than usual: a transfer takes %.3g ms instead of %.3g",
                   whose, news->factor, 1e3 * news->seconds, 1e3 * news->usual_seconds);
    add_cause(monitor, measure, news, words, sizeof words);
  }
  (void)snprintf(event.words, sizeof event.words, "%.191s", words);
  even_monitor_note_event(monitor, &event);
  if (monitor->notice != NULL) {
    monitor->notice(monitor->notice_context, words);
  }
}

typedef struct looked_at {
  const even_monitor *monitor;
  const even_measure *measure;
} looked_at;

/* What takes a process's CPU holds up what it sends and gets as a slow link does, but not for longer than what it
 * computes: that is the rank's affair. */
static double excused(const void *context, int rank) {
  const looked_at *at = context;
  const even_monitor *monitor = at->monitor;
  double most = 0;
  for (int other = 0; other < at->measure->ranks; other++) {
    double busy = at->measure->rank[other].busy_seconds;
    if (even_lagging_lasts(monitor, other) && strcmp(host_of(monitor, other), host_of(monitor, rank)) == 0) {
      most = fmax(most, isfinite(busy) ? busy : (double)INFINITY);
    }
  }
  return most;
}

void even_slow_links_look(even_monitor *monitor, uint64_t now_ns) {
  even_measure measure;
  even_link_news news;
  if (monitor->links == NULL || !even_links_known(monitor->links)) {
    return;
  }
  even_state_measure(monitor->state, now_ns, &measure);
  double least = isfinite(measure.step_seconds) ? fmax(LEAST_SECONDS, MATTERS * measure.step_seconds) : LEAST_SECONDS;
  const looked_at at = {.monitor = monitor, .measure = &measure};
  if (even_links_look(monitor->links, least, excused, &at, &news)) {
    tell(monitor, &measure, &news);
  }
}

void even_slow_links_end(even_monitor *monitor) {
  even_link_news news;
  if (monitor->links != NULL && even_links_lasts(monitor->links, &news)) {
    news.over = true;
    tell(monitor, NULL, &news);
  }
  if (monitor->links != NULL) {
    even_links_forget(monitor->links);
  }
}
