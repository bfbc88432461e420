/* From the steps in the rings to the one rank that may be worth less than nothing, and to its end. */
#include "orchestrator/stragglers.h"

#include "balancer/lag.h"
#include "base/alloc.h"
#include "base/fail.h"
#include "fault/generation_sets.h"
#include "orchestrator/remote.h"
#include "orchestrator/succession.h"
#include "os/clock.h"

#include <evenstep/telemetry.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { RECORDS = 128 };
static const uint64_t every_ns = 1000000000u;
static const double pause_seconds = 600;
static const double patience_seconds = 60;
static const double least_gain = 0.05;

typedef struct watched {
  long steps;        /* in which its end would have been a gain, in a row */
  uint64_t since_ns; /* 0: it is none */
  bool renewed;      /* a new process was started in its place for it: what is slow now is not the process */
  bool rests;        /* a process that waited elsewhere took its place */
  char told[160];    /* why it is kept, as said */
} watched;

struct even_stragglers {
  even_telemetry_reader *reader;
  even_lags *lags;
  watched *ranks;
  bool *members;
  bool *these;
  size_t count;
  uint64_t begun_ns;
  uint64_t looked_ns;
  uint64_t ended_ns; /* the last; 0: none was */
};

static even_status open_all(const even_job *job, even_stragglers *on) {
  EVEN_TRY(even_telemetry_reader_open(job->params->telemetry_fd, &on->reader));
  EVEN_TRY(even_lags_open(on->count, &on->lags));
  EVEN_TRY(EVEN_NEW_ARRAY(&on->ranks, on->count));
  EVEN_TRY(EVEN_NEW_ARRAY(&on->members, on->count));
  return EVEN_NEW_ARRAY(&on->these, on->count);
}

even_status even_stragglers_open(const even_job *job, even_stragglers **out) {
  even_stragglers *on = NULL;
  *out = NULL;
  if (job->params->on_straggler == EVEN_ON_STRAGGLER_KEEP || job->params->telemetry_fd < 0 || job->follower != NULL ||
      !job->params->shrink) {
    return EVEN_OK;
  }
  EVEN_TRY(EVEN_NEW(&on));
  on->count = job->count;
  even_status status = open_all(job, on);
  if (status != EVEN_OK) {
    even_stragglers_close(on);
    return status;
  }
  *out = on;
  return EVEN_OK;
}

void even_stragglers_close(even_stragglers *on) {
  if (on != NULL) {
    even_telemetry_reader_close(on->reader);
    even_lags_close(on->lags);
    even_free(on->ranks);
    even_free(on->members);
    even_free(on->these);
    even_free(on);
  }
}

static void forget_gains(even_stragglers *on, size_t but) {
  for (size_t i = 0; i < on->count; i++) {
    if (i != but) {
      on->ranks[i].since_ns = 0;
      on->ranks[i].steps = 0;
    }
  }
}

void even_stragglers_begin(even_stragglers *on) {
  if (on != NULL) {
    on->begun_ns = even_clock_ns();
    for (size_t i = 0; i < on->count; i++) {
      even_lags_forget(on->lags, i);
      on->ranks[i] = (watched){.steps = 0};
    }
  }
}

void even_stragglers_begin_rank(even_stragglers *on, size_t rank) {
  if (on != NULL) {
    even_lags_forget(on->lags, rank);
    on->ranks[rank].since_ns = 0;
    on->ranks[rank].steps = 0;
    on->ranks[rank].told[0] = '\0';
  }
}

uint64_t even_stragglers_rest_ns(const even_stragglers *on, size_t rank) {
  return on != NULL && on->ranks[rank].rests ? (uint64_t)(pause_seconds * 1e9) : 0;
}

/* ---- what the ranks do ---- */

static void take(even_stragglers *on, const even_record *record) {
  if (record->kind != EVEN_RECORD_STEP || record->rank >= on->count || record->as.step.end_ns < on->begun_ns) {
    return;
  }
  const even_step_record *made = &record->as.step;
  const even_lag_step step = {.step = made->step,
                              .end_ns = made->end_ns,
                              .duration_ns = made->duration_ns,
                              .samples = made->samples,
                              .busy_seconds = (double)made->busy_ns / 1e9};
  even_lags_take(on->lags, record->rank, &step);
  on->ranks[record->rank].steps += on->ranks[record->rank].since_ns != 0 ? 1 : 0;
}

static void read_rings(even_stragglers *on) {
  even_record records[RECORDS];
  size_t got = RECORDS;
  for (int round = 0; got == RECORDS && round < 64; round++) {
    got = even_telemetry_reader_drain(on->reader, records, RECORDS, NULL);
    for (size_t i = 0; i < got; i++) {
      take(on, &records[i]);
    }
  }
}

/* ---- whether one should go ---- */

static bool is_member(const even_job *job, size_t rank) {
  return job->ranks[rank].alive && !even_job_is_outside(job, rank);
}

/* Nothing else happens to the members now, and their steps can be compared. */
static bool calm(even_job *job) {
  if (!even_succession_acts(job) || even_generation_is_apart(job->generation) || job->stage != EVEN_JOB_RUNS ||
      job->draining != 0 || job->changing || job->interrupted != 0 || job->undecided_ns != 0 || job->lost_ns != 0 ||
      job->awaits_joiner || even_job_any_stands(job)) {
    return false;
  }
  for (size_t i = 0; i < job->count; i++) {
    if (is_member(job, i) && (even_job_is_new(job, i) || even_generation_doubts(job->generation, (int)i) ||
                              job->ranks[i].hung || job->ranks[i].stands)) {
      return false;
    }
  }
  return true;
}

/* Whether a process waits elsewhere, in a place that was not left for being slow. */
static bool spare_waits(const even_stragglers *on, const even_job *job) {
  for (size_t i = 0; i < job->count; i++) {
    if (job->ranks[i].alive && even_job_is_outside(job, i) && !on->ranks[i].rests && !on->ranks[i].renewed &&
        even_generation_offers(job->generation, (int)i)) {
      return true;
    }
  }
  return false;
}

typedef struct verdict {
  bool spare;
  double before; /* a step, in seconds */
  double after;
} verdict;

/* What a step would take without it, or with another process in its place; NAN where that is not known. */
static verdict weigh(const even_stragglers *on, const even_job *job, size_t rank) {
  even_lag_use use;
  verdict out = {.before = NAN, .after = NAN};
  if (even_lags_weigh(on->lags, rank, on->members, job->params->shares_follow, &use) != EVEN_OK) {
    even_error_clear();
    return out;
  }
  out.before = use.with;
  if (job->params->on_straggler == EVEN_ON_STRAGGLER_LEAVE) {
    out.after = use.without;
  } else if (spare_waits(on, job)) {
    out.spare = true;
    out.after = use.moved;
  } else if (!on->ranks[rank].renewed) {
    out.after = use.renewed;
  }
  return out;
}

static double asked(double given, double otherwise) {
  return given > 0 ? given : otherwise;
}

/* The only one there, whose host would be in the job for nothing. */
static bool last_of_its_host(const even_stragglers *on, const even_job *job, size_t rank) {
  for (size_t i = 0; i < job->count; i++) {
    if (i != rank && on->members[i] && even_job_host_number(job, i) == even_job_host_number(job, rank)) {
      return false;
    }
  }
  return job->most_groups > 1; /* hosts may have joined since it began */
}

static bool state_is_left(even_job *job, size_t rank) {
  for (size_t i = 0; i < job->count; i++) {
    if (i != rank && even_job_has_state(job, i)) {
      return true;
    }
  }
  return false;
}

static void keep(even_stragglers *on, even_job *job, size_t rank, const char *why) {
  watched *at = &on->ranks[rank];
  if (strcmp(at->told, why) != 0) {
    (void)snprintf(at->told, sizeof at->told, "%s", why);
    even_job_notice(job, "rank %zu (%s) holds the others up, and is kept: %s", rank,
                    job->params->devices->items[rank].name, why);
  }
}

/* Why it is kept all the same; "" for nothing. */
static bool hindered(even_stragglers *on, even_job *job, size_t rank, const verdict *by, uint64_t now_ns,
                     even_text *why) {
  double pause = asked(job->params->straggler_pause_seconds, pause_seconds);
  bool later = false;
  memset(on->these, 0, on->count * sizeof *on->these);
  on->these[rank] = true;
  if (on->ended_ns != 0 && now_ns - on->ended_ns < (uint64_t)(pause * 1e9)) {
    even_text_format(why, "another rank was ended less than %.0f s ago", pause);
  } else if (job->params->on_straggler == EVEN_ON_STRAGGLER_LEAVE && last_of_its_host(on, job, rank)) {
    even_text_format(why, "it is the last one of its host (`evenstep drain %s` lets that go)",
                     even_job_host_name(job, rank));
  } else if (job->params->on_straggler == EVEN_ON_STRAGGLER_REPLACE && !by->spare &&
             !even_job_replace_could(job, rank)) {
    even_text_add(why, "a process in its place could not get the state of training there under this leader");
  } else if (!state_is_left(job, rank)) {
    even_text_add(why, "no other has the state of training yet");
  } else if (!even_job_can_do_without(job, on->these, why, &later)) {
    even_text_add(why, later && why->length == 0 ? "that is not known yet" : "");
  } else {
    return false;
  }
  return true;
}

static void end(even_stragglers *on, even_job *job, size_t rank, const verdict *by, uint64_t now_ns) {
  even_job_rank *own = &job->ranks[rank];
  watched *at = &on->ranks[rank];
  bool leave = job->params->on_straggler == EVEN_ON_STRAGGLER_LEAVE;
  (void)snprintf(own->slow_words, sizeof own->slow_words,
                 "by the balancer's models steps take %.3g ms, and %.3g ms %s (for %.0f s, %ld steps)",
                 1e3 * by->before, 1e3 * by->after,
                 leave       ? "without it"
                 : by->spare ? "with the process that waits for a place"
                             : "with one as fast as it was before",
                 (double)(now_ns - at->since_ns) * 1e-9, at->steps);
  own->slow = true;
  char words[320];
  (void)snprintf(words, sizeof words, "rank %zu (%s on %s) holds the others up, and is ended: %s", rank,
                 job->params->devices->items[rank].name, even_job_host_name(job, rank), own->slow_words);
  even_job_notice(job, "%s", words);
  if (job->params->observer.straggler_ended != NULL) {
    job->params->observer.straggler_ended(job->params->observer.context, (int)rank, words);
  }
  on->ended_ns = now_ns;
  at->rests = by->spare;
  at->renewed = !leave && !by->spare;
  forget_gains(on, on->count);
  even_job_end_alone(job, rank, false);
}

static void decide(even_stragglers *on, even_job *job, uint64_t now_ns) {
  for (size_t i = 0; i < on->count; i++) {
    on->members[i] = is_member(job, i);
    if (!on->members[i]) {
      even_lags_forget(on->lags, i); /* how it was says nothing of those who go on */
    }
  }
  size_t rank = even_lags_slowest(on->lags, on->members);
  if (rank >= on->count || !calm(job)) {
    forget_gains(on, on->count);
    return;
  }
  verdict by = weigh(on, job, rank);
  double gain = 1 - by.after / by.before;
  forget_gains(on, gain >= asked(job->params->straggler_gain, least_gain) ? rank : on->count);
  watched *at = &on->ranks[rank];
  if (!(gain >= asked(job->params->straggler_gain, least_gain))) {
    return;
  }
  at->since_ns = at->since_ns == 0 ? now_ns : at->since_ns;
  double patience = asked(job->params->straggler_seconds, patience_seconds);
  if (now_ns - at->since_ns < (uint64_t)(patience * 1e9) || at->steps < EVEN_STRAGGLERS_STEPS) {
    return;
  }
  even_text why = EVEN_TEXT_EMPTY;
  if (hindered(on, job, rank, &by, now_ns, &why)) {
    keep(on, job, rank, even_text_string(&why));
  } else {
    end(on, job, rank, &by, now_ns);
  }
  even_text_free(&why);
}

void even_stragglers_look_now(even_stragglers *on) {
  on->looked_ns = 0;
}

void even_stragglers_tick(even_stragglers *on, even_job *job) {
  if (on == NULL || job->generation == NULL) {
    return;
  }
  uint64_t now = even_clock_ns();
  read_rings(on);
  if (now - on->looked_ns >= every_ns && job->stage == EVEN_JOB_RUNS) {
    on->looked_ns = now;
    decide(on, job, now);
  }
}
