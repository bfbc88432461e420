/* Steps into the lags, lags and causes into events. */
#include "monitor/lagging.h"

#include "balancer/lag.h"
#include "base/alloc.h"
#include "base/fail.h"
#include "monitor/straggler.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum {
  LINES = 8,
  LOOKS_FOR_CAUSE = 3, /* at a rank that lags, before it is told without one */
  /* A rank that is slower than others of its model from its first step on, with a cause on its host: seen in so many
   * looks in a row, of the first so many. Of more ranks it is not asked: each would be compared with all. */
  LOOKS_AT_START = 3,
  START_LOOKS = 60,
  START_RANKS = 256
};

typedef struct watched {
  bool told;
  uint32_t begin_step;
  uint64_t begin_ns;
  unsigned looks; /* since it lags */
  unsigned seen[EVEN_STRAGGLER_COUNT];
  char why[128]; /* of the cause that was seen most often */
  unsigned start_looks;
  unsigned start_seen; /* in a row */
} watched;

struct even_lagging {
  even_lags *lags;
  watched *rank;
  bool *alike;
  int ranks;
};

even_status even_lagging_open(int ranks, double factor, double seconds, even_lagging **out) {
  even_lagging *lagging = NULL;
  *out = NULL;
  EVEN_TRY(EVEN_NEW(&lagging));
  lagging->ranks = ranks;
  even_status status = even_lags_open((size_t)ranks, &lagging->lags);
  status = status == EVEN_OK ? EVEN_NEW_ARRAY(&lagging->rank, (size_t)ranks) : status;
  status = status == EVEN_OK ? EVEN_NEW_ARRAY(&lagging->alike, (size_t)ranks) : status;
  if (status != EVEN_OK) {
    even_lagging_close(lagging);
    return status;
  }
  even_lags_limit(lagging->lags, factor, seconds);
  *out = lagging;
  return EVEN_OK;
}

even_status even_lagging_grow(even_lagging *lagging, int ranks) {
  size_t before = (size_t)lagging->ranks;
  size_t after = (size_t)ranks;
  if (ranks <= lagging->ranks) {
    return EVEN_OK;
  }
  EVEN_TRY(even_realloc((void **)&lagging->rank, after, sizeof *lagging->rank));
  EVEN_TRY(even_realloc((void **)&lagging->alike, after, sizeof *lagging->alike));
  EVEN_TRY(even_lags_grow(lagging->lags, after)); /* the last: it is asked of as many as it has */
  memset(&lagging->rank[before], 0, (after - before) * sizeof *lagging->rank);
  lagging->ranks = ranks;
  return EVEN_OK;
}

void even_lagging_close(even_lagging *lagging) {
  if (lagging != NULL) {
    even_lags_close(lagging->lags);
    even_free(lagging->rank);
    even_free(lagging->alike);
    even_free(lagging);
  }
}

void even_lagging_step(even_monitor *monitor, int rank, const even_step_record *record) {
  const even_lag_step step = {.step = record->step,
                              .end_ns = record->end_ns,
                              .duration_ns = record->duration_ns,
                              .samples = record->samples,
                              .busy_seconds = (double)record->busy_ns / 1e9};
  if (monitor->lagging != NULL && rank < monitor->lagging->ranks) {
    even_lags_take(monitor->lagging->lags, (size_t)rank, &step);
  }
}

/* ---- words ---- */

void even_lagging_words(const even_state_straggler *told, char *out, size_t bytes) {
  char when[96];
  double seconds = told->end_ns > told->begin_ns ? (double)(told->end_ns - told->begin_ns) / 1e9 : 0;
  if (told->over) {
    (void)snprintf(when, sizeof when, "was %.1fx slower from step %" PRIu32 " to %" PRIu32 " (%.3g s)", told->factor,
                   told->begin_step, told->end_step, seconds);
  } else {
    (void)snprintf(when, sizeof when, "is %.1fx slower since step %" PRIu32, told->factor, told->begin_step);
  }
  (void)snprintf(out, bytes, "rank %d (%s%s%s) %s: %s%s", told->rank, told->device, told->host[0] != '\0' ? " on " : "",
                 told->host, when, even_straggler_label(told->cause), told->over ? "" : told->why);
}

void even_lagging_lines(const even_state *state, even_text *out) {
  size_t count = 0;
  char words[256];
  while (even_state_straggler_at(state, count) != NULL) {
    count++;
  }
  uint64_t left_out = state->straggler_count - (count < LINES ? count : LINES);
  if (left_out > 0) {
    even_text_format(out, "  %" PRIu64 " times more a rank was slower than usual (table stragglers of run.db)\n",
                     left_out);
  }
  for (size_t i = count < LINES ? 0 : count - LINES; i < count; i++) {
    even_lagging_words(even_state_straggler_at(state, i), words, sizeof words);
    even_text_format(out, "  %s\n", words);
  }
}

static double seconds_of(const even_state *state, uint64_t at_ns) {
  return round(((double)at_ns - (double)state->started_ns) / 1e6) / 1e3;
}

void even_lagging_json(even_json *json, const even_state *state) {
  const even_state_straggler *at = NULL;
  char words[256];
  even_json_array(json, "stragglers");
  for (size_t i = 0; (at = even_state_straggler_at(state, i)) != NULL; i++) {
    even_json_object(json, NULL);
    even_json_integer(json, "attempt", at->attempt);
    even_json_integer(json, "rank", at->rank);
    even_json_string(json, "host", at->host);
    even_json_string(json, "device", at->device);
    even_json_string(json, "cause", at->cause);
    even_json_number(json, "factor", round(100 * at->factor) / 100);
    even_json_unsigned(json, "begin_step", at->begin_step);
    even_json_number(json, "begin_seconds", seconds_of(state, at->begin_ns));
    if (at->over) {
      even_json_unsigned(json, "end_step", at->end_step);
      even_json_number(json, "end_seconds", seconds_of(state, at->end_ns));
    } else {
      even_json_null(json, "end_step");
      even_json_null(json, "end_seconds");
    }
    even_json_bool(json, "lasts", !at->over && state->ended_ns == 0);
    even_lagging_words(at, words, sizeof words);
    even_json_string(json, "words", words);
    even_json_object_end(json);
  }
  even_json_array_end(json);
}

/* ---- causes ---- */

/* The other rank that works fastest; itself where there is none. */
static int fastest_beside(const even_measure *measure, int rank) {
  int found = rank;
  for (int r = 0; r < measure->ranks; r++) {
    double speed = measure->rank[r].samples_per_busy_second;
    if (r != rank && isfinite(speed) && (found == rank || speed > measure->rank[found].samples_per_busy_second)) {
      found = r;
    }
  }
  return found;
}

/* The one seen most often, if in a quarter of the looks. */
static even_straggler_cause usual_cause(const watched *at) {
  int found = EVEN_STRAGGLER_UNKNOWN;
  unsigned most = at->looks / 4;
  for (int cause = EVEN_STRAGGLER_UNKNOWN + 1; cause < EVEN_STRAGGLER_COUNT; cause++) {
    if (at->seen[cause] > most) {
      most = at->seen[cause];
      found = cause;
    }
  }
  return (even_straggler_cause)found;
}

static void take_cause(watched *at, const even_straggler *why) {
  at->looks++;
  at->seen[why->cause]++;
  if (why->cause != EVEN_STRAGGLER_UNKNOWN && usual_cause(at) == why->cause) {
    (void)snprintf(at->why, sizeof at->why, "%s", why->words);
  }
}

/* ---- begin and end ---- */

static void tell(even_monitor *monitor, int rank, bool over, uint64_t at_ns) {
  watched *at = &monitor->lagging->rank[rank];
  const even_state_rank *facts = &monitor->state->rank[rank];
  even_lag lag = even_lags_of(monitor->lagging->lags, (size_t)rank);
  even_state_straggler told = {.attempt = monitor->state->attempt,
                               .rank = rank,
                               .factor = lag.factor,
                               .begin_step = at->begin_step,
                               .begin_ns = at->begin_ns,
                               .over = over,
                               .end_step = lag.to_step,
                               .end_ns = lag.to_ns};
  char words[256];
  const char *host = strstr(facts->device, " on "); /* of another one, in whose name */
  int length = host != NULL ? (int)(host - facts->device) : (int)strlen(facts->device);
  (void)snprintf(told.device, sizeof told.device, "%.*s", length, facts->device);
  (void)snprintf(told.host, sizeof told.host, "%s", facts->host);
  (void)snprintf(told.cause, sizeof told.cause, "%s", even_straggler_name(usual_cause(at)));
  (void)snprintf(told.why, sizeof told.why, "%s", at->why);
  even_lagging_words(&told, words, sizeof words);
  even_state_straggler_add(monitor->state, &told);
  EVEN_HISTORY(even_database_straggler(monitor->database, &told));
  even_state_event event = {.attempt = told.attempt,
                            .rank = rank,
                            .step = over ? told.end_step : told.begin_step,
                            .at_ns = at_ns,
                            .event = EVEN_EVENT_STRAGGLER,
                            .value = over ? 0 : (int64_t)lround(100 * told.factor)};
  (void)snprintf(event.words, sizeof event.words, "%.191s", words);
  even_monitor_note_event(monitor, &event);
  if (monitor->notice != NULL) {
    monitor->notice(monitor->notice_context, words);
  }
}

static void begin(even_monitor *monitor, int rank, const even_lag *lag) {
  watched *at = &monitor->lagging->rank[rank];
  at->told = true;
  at->begin_step = lag->from_step;
  at->begin_ns = lag->from_ns;
  tell(monitor, rank, false, lag->from_ns);
}

bool even_lagging_lasts(const even_monitor *monitor, int rank) {
  return monitor->lagging != NULL && rank < monitor->lagging->ranks && monitor->lagging->rank[rank].told;
}

void even_lagging_end(even_monitor *monitor, int rank) {
  even_lagging *lagging = monitor->lagging;
  if (lagging == NULL || rank >= lagging->ranks) {
    return;
  }
  if (lagging->rank[rank].told) {
    tell(monitor, rank, true, even_lags_of(lagging->lags, (size_t)rank).to_ns);
  }
  lagging->rank[rank] = (watched){.told = false};
  even_lags_forget(lagging->lags, (size_t)rank);
}

void even_lagging_end_all(even_monitor *monitor) {
  for (int rank = 0; monitor->lagging != NULL && rank < monitor->lagging->ranks; rank++) {
    even_lagging_end(monitor, rank);
  }
}

/* ---- gone on with ---- */

static void learn_steps(even_monitor *monitor) {
  const even_state *state = monitor->state;
  for (long step = state->last_step - EVEN_STATE_WINDOW + 1; step <= state->last_step; step++) {
    for (int rank = 0; step >= 0 && rank < state->ranks; rank++) {
      const even_state_rank *at = &state->rank[rank];
      size_t slot = (size_t)step % EVEN_STATE_WINDOW;
      if (at->window_attempt[slot] == (uint32_t)state->attempt + 1 && at->window[slot].step == (uint32_t)step) {
        even_lagging_step(monitor, rank, &at->window[slot]);
      }
    }
  }
}

/* Whether it is one that still lags, as far as the last steps say; its usual time is what they and its factor say. */
static bool goes_on(even_lagging *lagging, const even_state_straggler *told) {
  watched *at = &lagging->rank[told->rank];
  if (!even_lags_of(lagging->lags, (size_t)told->rank).lags) {
    even_lags_since_start(lagging->lags, (size_t)told->rank, told->factor);
  }
  if (!even_lags_of(lagging->lags, (size_t)told->rank).lags) {
    return false;
  }
  *at = (watched){
      .told = true, .begin_step = told->begin_step, .begin_ns = told->begin_ns, .looks = 1, .start_looks = START_LOOKS};
  for (int cause = 0; cause < EVEN_STRAGGLER_COUNT; cause++) {
    at->seen[cause] = strcmp(even_straggler_name((even_straggler_cause)cause), told->cause) == 0 ? 1 : 0;
  }
  (void)snprintf(at->why, sizeof at->why, "%s", told->why);
  return true;
}

int even_lagging_go_on(even_monitor *monitor) {
  int count = 0;
  const even_state_straggler *at = NULL;
  learn_steps(monitor);
  for (size_t i = 0; (at = even_state_straggler_at(monitor->state, i)) != NULL; i++) {
    even_state_straggler told = *at;
    if (told.over || told.attempt != monitor->state->attempt) {
      continue;
    }
    if (monitor->lagging != NULL && told.rank >= 0 && told.rank < monitor->lagging->ranks &&
        goes_on(monitor->lagging, &told)) {
      count++;
      continue;
    }
    told.over = true;
    told.end_step = monitor->state->last_step < 0 ? 0 : (uint32_t)monitor->state->last_step;
    told.end_ns = monitor->state->last_end_ns;
    even_state_straggler_add(monitor->state, &told);
    EVEN_HISTORY(even_database_straggler(monitor->database, &told));
  }
  return count;
}

/* ---- looks ---- */

/* Whether it was slower than its like from its first step on, as far as that can be told. */
static double slow_from_start(even_monitor *monitor, int rank, const even_straggler *why) {
  even_lagging *lagging = monitor->lagging;
  watched *at = &lagging->rank[rank];
  const char *model = monitor->state->rank[rank].model;
  bool any = false;
  if (at->start_looks >= START_LOOKS || lagging->ranks > START_RANKS || why->cause == EVEN_STRAGGLER_UNKNOWN) {
    at->start_seen = 0;
    return NAN;
  }
  for (int r = 0; r < lagging->ranks; r++) {
    lagging->alike[r] = r != rank && strcmp(monitor->state->rank[r].model, model) == 0;
    any = any || lagging->alike[r];
  }
  double times = any ? even_lags_beside(lagging->lags, (size_t)rank, lagging->alike) : (double)NAN;
  if (!isfinite(times)) {
    return NAN;
  }
  at->start_looks++;
  at->start_seen = times >= even_lags_begins(lagging->lags) ? at->start_seen + 1 : 0;
  return at->start_seen >= LOOKS_AT_START ? times : (double)NAN;
}

/* Once a second. */
static void look_for_causes(even_monitor *monitor, uint64_t now_ns) {
  even_lagging *lagging = monitor->lagging;
  even_measure measure;
  even_state_measure(monitor->state, now_ns, &measure);
  for (int rank = 0; rank < lagging->ranks && rank < measure.ranks; rank++) {
    watched *at = &lagging->rank[rank];
    bool lags = even_lags_of(lagging->lags, (size_t)rank).lags;
    if ((!lags && at->start_looks >= START_LOOKS) || !isfinite(measure.rank[rank].busy_seconds)) {
      continue;
    }
    even_straggler why;
    even_straggler_find(&measure, rank, fastest_beside(&measure, rank), &why);
    double times = lags ? (double)NAN : slow_from_start(monitor, rank, &why);
    if (isfinite(times)) {
      even_lags_since_start(lagging->lags, (size_t)rank, times);
      lags = true;
      at->start_looks = START_LOOKS;
    }
    if (lags) {
      take_cause(at, &why);
    }
  }
}

/* Whether there is anything that causes could be looked for. */
static bool wanted(const even_lagging *lagging) {
  for (int rank = 0; rank < lagging->ranks; rank++) {
    if (even_lags_of(lagging->lags, (size_t)rank).lags || lagging->rank[rank].start_looks < START_LOOKS) {
      return true;
    }
  }
  return false;
}

void even_lagging_look(even_monitor *monitor, uint64_t now_ns, bool looked) {
  even_lagging *lagging = monitor->lagging;
  if (lagging == NULL) {
    return;
  }
  if (looked && monitor->state->last_step >= 0 && wanted(lagging)) {
    look_for_causes(monitor, now_ns);
  }
  for (int rank = 0; rank < lagging->ranks; rank++) {
    watched *at = &lagging->rank[rank];
    even_lag lag = even_lags_of(lagging->lags, (size_t)rank);
    if (lag.lags && !at->told && (usual_cause(at) != EVEN_STRAGGLER_UNKNOWN || at->looks >= LOOKS_FOR_CAUSE)) {
      begin(monitor, rank, &lag);
    } else if (!lag.lags && at->told) {
      tell(monitor, rank, true, lag.to_ns);
      unsigned start_looks = at->start_looks;
      *at = (watched){.start_looks = start_looks};
    } else if (!lag.lags) {
      at->looks = 0; /* it caught up before it was told */
      memset(at->seen, 0, sizeof at->seen);
    }
  }
}
