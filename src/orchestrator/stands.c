/* Ranks that hold the others up and do not end: stopped ones, and ones that hang. Where the others can go on without
 * them (--recovery shrink, replace), they alone are ended. */
#include "base/alloc.h"
#include "base/fail.h"
#include "comm/peers.h"
#include "orchestrator/boards.h"
#include "orchestrator/follower.h"
#include "orchestrator/gifts.h"
#include "orchestrator/job.h"
#include "orchestrator/remote.h"
#include "os/clock.h"
#include "os/process_stat.h"

#include <math.h>

/* So long a rank may stand still once calls of the others have failed for it, which is after EVENSTEP_STOP_GRACE. */
static const double patience_seconds = 1;

static bool is_member(const even_job *job, size_t rank) {
  return job->ranks[rank].alive && !even_job_is_outside(job, rank);
}

static double patience(const even_job *job) {
  return job->params->stop_seconds > 0 ? job->params->stop_seconds : patience_seconds;
}

/* As calls of the others fail, by what the ranks have where nothing is said; INFINITY: never. */
static double grace(const even_job *job) {
  return job->params->stop_grace_seconds > 0 ? job->params->stop_grace_seconds : EVEN_COMM_STOP_GRACE_SECONDS;
}

/* ---- what the kernel, or another host's agent, says ---- */

static void note(even_job *job, even_job_rank *rank, bool stands) {
  rank->stands = stands;
  rank->stopped_by = stands ? rank->stopped_by : 0;
  rank->stopped_ns = stands ? even_clock_ns() : 0;
  rank->awaited_ns = rank->missed_ns = 0;
  if (job->generation != NULL) {
    rank->stood = (uint64_t)even_generation_number(job->generation) + 1;
  }
}

void even_job_rank_stands(even_job *job, even_job_rank *rank) {
  note(job, rank, true);
}

void even_job_rank_continues(even_job *job, even_job_rank *rank) {
  note(job, rank, false);
  if (job->follower != NULL) {
    even_job_follower_tell_stopped(job, rank, 0);
  }
}

static bool stands_now(const even_job_rank *rank) {
  even_process_stat facts;
  return rank->elsewhere ? rank->stands
                         : even_process_stat_read(rank->pid, &facts) == 0 && facts.state == 'T'; /* 't': a debugger's */
}

/* ---- ending one ---- */

void even_job_end_alone(even_job *job, size_t rank, bool standing) {
  even_job_rank *own = &job->ranks[rank];
  if (own->elsewhere) {
    even_job_host_end_rank(job, rank, standing);
  } else if (own->alive && (!standing || stands_now(own))) {
    own->stood_still = standing;
    (void)even_process_signal_group(own->pid, SIGKILL);
  }
}

/* The ranks in `held` hold the others up: ends them where the others can go on without. *later: they may, once some
 * have said so. */
static bool end_those(even_job *job, const bool *held, bool standing, even_text *why, bool *later) {
  if (!even_job_can_do_without(job, held, why, later)) {
    return false;
  }
  for (size_t i = 0; i < job->count; i++) {
    if (held[i]) {
      even_job_end_alone(job, i, standing);
    }
  }
  return true;
}

/* ---- stopped ranks ---- */

/* Whether calls of a member have failed, so that it waits for a newer generation. */
static bool anybody_doubts(const even_job *job) {
  for (size_t i = 0; i < job->count; i++) {
    if (is_member(job, i) && even_generation_doubts(job->generation, (int)i)) {
      return true;
    }
  }
  return false;
}

typedef struct standing {
  size_t still;    /* members that do now, */
  size_t too_long; /* and have done so for too long; */
  size_t over;     /* that did in this generation, and go on; */
  bool heard;      /* one has been held for so long that who was to say something of going on without it has done so */
} standing;

static standing look(even_job *job, bool doubts, bool *held) {
  standing found = {0, 0, 0, false};
  bool between = even_job_any_stands(job); /* whether one waits between two steps for the others to come there */
  /* where no call has failed yet, the grace comes first; INFINITY: never */
  double seconds = patience(job) + (doubts && isfinite(grace(job)) ? 0.0 : grace(job));
  uint64_t now = even_clock_ns();
  uint64_t generation = (uint64_t)even_generation_number(job->generation) + 1;
  for (size_t i = 0; i < job->count; i++) {
    even_job_rank *rank = &job->ranks[i];
    held[i] = false;
    if (!is_member(job, i)) {
      continue;
    }
    bool awaited = doubts || (between && !even_generation_stands(job->generation, (int)i));
    if (!awaited || !stands_now(rank)) {
      rank->awaited_ns = 0;
      found.over += rank->stood == generation && !rank->stood_still ? 1 : 0; /* not one that was ended, and dies */
      continue;
    }
    found.still++;
    rank->awaited_ns = rank->awaited_ns == 0 ? now : rank->awaited_ns;
    double waited = (double)(now - rank->awaited_ns);
    held[i] = waited >= seconds * 1e9;
    found.heard = found.heard || waited >= seconds * 1e9 + (double)EVEN_JOB_HEARSAY_NS;
    found.too_long += held[i] ? 1 : 0;
  }
  return found;
}

/* Those that stood still go on in time: nobody is lost, and what has failed is made again by all. */
static void go_on_together(even_job *job) {
  even_gifts_plan(job); /* one that joined may not have the state yet */
  uint32_t number = even_generation_grow(job->generation, NULL);
  even_boards_turn(job);
  even_job_notice(job, "generation %u: the stopped rank goes on, and the step under way is made again by all", number);
}

/* heard: nobody is waited for any more, but where this host may be the one that is cut off. */
static void end_standing(even_job *job, const bool *held, bool heard) {
  even_text why = EVEN_TEXT_EMPTY;
  bool later = false;
  if (end_those(job, held, true, &why, &later)) {
    for (size_t i = 0; i < job->count; i++) {
      job->ranks[i].awaited_ns = 0; /* one of another host may go on meanwhile: it is looked at anew */
      if (held[i]) {
        even_job_notice(job, "rank %zu still stands, and the others wait for it: it is ended, so that they go on", i);
      }
    }
  } else if (!later || (heard && job->lost_ns == 0)) {
    even_job_notice(job, "the others cannot go on without the rank that stands still: %s", even_text_string(&why));
    even_job_generations_refuse(job);
  }
  even_text_free(&why);
}

void even_job_stands_tick(even_job *job) {
  if (job->generation == NULL || job->follower != NULL || job->stage != EVEN_JOB_RUNS ||
      even_generation_refused(job->generation) || even_job_guardian_holds(job)) {
    /* those that it holds go on in a moment: this agent may act again */
    return;
  }
  bool *held = NULL;
  bool doubts = anybody_doubts(job);
  if (EVEN_NEW_ARRAY(&held, job->count) != EVEN_OK) {
    even_error_clear(); /* at the next tick */
    return;
  }
  standing found = look(job, doubts, held);
  if (found.too_long > 0) {
    end_standing(job, held, found.heard);
  } else if (doubts && found.still == 0 && found.over > 0) {
    go_on_together(job);
  }
  even_free(held);
}

/* ---- before all have come together ---- */

/* What ranks wait for until all have come to it. */
typedef struct meetings {
  bool joining;    /* a call of Evenstep's, */
  int64_t opening; /* torch's init_process_group: for which time; 0: none */
} meetings;

/* One that stands itself waits for nobody: the whole job may have been stopped. */
static meetings look_for_meetings(const even_job *job) {
  meetings found = {false, 0};
  for (size_t i = 0; i < job->count; i++) {
    const even_rank_progress *its = &job->progress.ranks[i];
    bool joining = its->joining && !its->joined;
    bool opening = its->opening > its->opened;
    if ((joining || opening) && is_member(job, i) && !stands_now(&job->ranks[i])) {
      found.joining = found.joining || joining;
      found.opening = opening && its->opening > found.opening ? its->opening : found.opening;
    }
  }
  return found;
}

static bool is_missed(const even_job *job, size_t rank, const meetings *held) {
  const even_rank_progress *its = &job->progress.ranks[rank];
  return is_member(job, rank) && ((held->joining && !its->joined) || its->opened < held->opening);
}

static bool any_was_stopped(const even_job *job) {
  for (size_t i = 0; i < job->count; i++) {
    if (job->ranks[i].alive && job->ranks[i].stands) {
      return true;
    }
  }
  return false;
}

void even_job_stands_at_start(even_job *job) {
  if (job->stage != EVEN_JOB_RUNS || job->follower != NULL || !any_was_stopped(job) || even_job_guardian_holds(job)) {
    return;
  }
  even_progress_read(&job->progress);
  meetings held = look_for_meetings(job);
  uint64_t now = even_clock_ns();
  for (size_t i = 0; i < job->count; i++) {
    even_job_rank *rank = &job->ranks[i];
    if (!rank->stands || !is_missed(job, i, &held) || !stands_now(rank)) {
      rank->missed_ns = 0;
      continue;
    }
    rank->missed_ns = rank->missed_ns == 0 ? now : rank->missed_ns;
    if ((double)(now - rank->missed_ns) >= (grace(job) + patience(job)) * 1e9) { /* no call of theirs fails before */
      rank->missed_ns = 0; /* one of another host may go on meanwhile: it is looked at anew */
      even_job_notice(job, "rank %zu still stands, and the others wait for all ranks to come together: it is ended", i);
      even_job_end_alone(job, i, true);
    }
  }
}

/* ---- ranks that hang ---- */

bool even_job_ends_hung_alone(even_job *job) {
  even_text why = EVEN_TEXT_EMPTY;
  bool *held = NULL;
  bool later = false;
  if (job->generation == NULL || EVEN_NEW_ARRAY(&held, job->count) != EVEN_OK) {
    even_error_clear();
    return false;
  }
  for (size_t i = 0; i < job->count; i++) {
    held[i] = is_member(job, i) && job->ranks[i].hung;
  }
  bool alone = end_those(job, held, false, &why, &later);
  if (!alone) {
    even_job_notice(job, "the others cannot go on without the rank that hangs: %s", even_text_string(&why));
  }
  even_text_free(&why);
  even_free(held);
  return alone;
}
