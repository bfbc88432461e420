/* A rank was killed: whether the others go on without it, in their processes (--recovery shrink). */
#include "base/alloc.h"
#include "base/fail.h"
#include "fault/generation.h"
#include "orchestrator/boards.h"
#include "orchestrator/gifts.h"
#include "orchestrator/outlast.h"
#include "orchestrator/remote.h"
#include "orchestrator/succession.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/pipe.h"

#include <stdio.h>
#include <string.h>

even_status even_job_generations_open(even_job *job) {
  if (!job->params->shrink) {
    return EVEN_OK;
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&job->lost, job->count));
  job->generation_fd = job->outlast != NULL && job->adopted ? even_outlast_generation(job) : -1;
  if (job->generation_fd < 0) {
    EVEN_TRY(even_generation_create((int)job->count, &job->generation_fd));
  }
  EVEN_TRY(even_generation_open(job->generation_fd, &job->generation));
  if (even_job_takes_in(job)) {
    even_generation_let_in(job->generation);
  }
  EVEN_TRY(even_boards_open(job));
  return even_job_replace_open(job);
}

void even_job_generations_close(even_job *job) {
  even_job_replace_close(job);
  even_boards_close(job);
  even_generation_close(job->generation);
  even_pipe_close(job->generation_fd);
  even_free(job->lost);
  job->generation = NULL;
  job->generation_fd = -1;
  job->lost = NULL;
}

int even_job_main_rank(const even_job *job) {
  uint32_t number = job->generation == NULL ? 0 : even_generation_number(job->generation);
  for (size_t i = 0; number > 0 && i < job->count; i++) {
    if (even_generation_has(job->generation, (int)i, number)) {
      return (int)i;
    }
  }
  return 0;
}

void even_job_tell_main_rank(even_job *job) {
  const even_agent_observer *observer = &job->params->observer;
  if (job->generation == NULL) { /* closed: what comes now is the rest of the last one's output */
    return;
  }
  int rank = even_job_main_rank(job);
  if (rank != job->main_rank) {
    job->main_rank = rank;
    if (observer->main_rank != NULL) {
      observer->main_rank(observer->context, rank);
    }
  }
}

even_status even_job_generations_begin(even_job *job) {
  bool *members = NULL;
  job->main_rank = 0;
  job->did_without = false;
  if (job->generation == NULL) {
    return EVEN_OK;
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&members, job->count));
  even_job_replace_begin(job, members);
  even_generation_begin(job->generation, members);
  even_free(members);
  even_boards_begin(job);
  memset(job->lost, 0, job->count * sizeof *job->lost);
  even_job_replace_keep_free(job);
  job->undecided_ns = 0;
  job->suspected = 0;
  return even_gifts_begin(job);
}

void even_job_generations_refuse(even_job *job) {
  if (job->generation != NULL) {
    even_generation_refuse(job->generation);
  }
}

bool even_job_lost(const even_job *job, size_t rank) {
  return job->lost != NULL && job->lost[rank];
}

/* ---- names ---- */

static bool is_member(const even_job *job, size_t rank) {
  return job->ranks[rank].alive && !even_job_is_outside(job, rank);
}

static bool is_missed(const even_job *job, size_t rank) {
  return job->ranks[rank].missed;
}

static void name_ranks(const even_job *job, bool (*in)(const even_job *, size_t), even_text *out) {
  size_t count = 0;
  size_t named = 0;
  for (size_t i = 0; i < job->count; i++) {
    count += in(job, i) ? 1 : 0;
  }
  even_text_add(out, count == 1 ? "rank " : "ranks ");
  for (size_t i = 0; i < job->count; i++) {
    if (in(job, i)) {
      named++;
      even_text_format(out, "%s%zu", named == 1 ? "" : named == count ? " and " : ", ", i);
    }
  }
}

void even_job_name_members(const even_job *job, even_text *out) {
  name_ranks(job, is_member, out);
}

/* "host there (ranks 2 and 3)" where they were lost with it. */
static void name_missed(const even_job *job, even_text *out) {
  const char *host = NULL;
  bool with_host = true;
  for (size_t i = 0; i < job->count; i++) {
    if (job->ranks[i].missed) {
      const char *its = even_job_host_name(job, i);
      with_host = with_host && job->ranks[i].lost != NULL && (host == NULL || host == its);
      host = its;
    }
  }
  if (with_host && host != NULL) {
    even_text_format(out, "host %s (", host);
  }
  name_ranks(job, is_missed, out);
  even_text_add(out, with_host && host != NULL ? ")" : "");
}

/* ---- deciding ---- */

/* Whether more may soon be heard of the rank that stands in the way: it has said nothing yet, or it is one of those in
 * `gone`, whose last word may still be on its way from another host. Of one of this host that is known. */
static bool may_say(even_job *job, int rank, const bool *gone) {
  even_generation_words said;
  even_generation_hear(job->generation, rank, &said);
  even_progress_read(&job->progress);
  bool elsewhere = job->ranks[rank].elsewhere;
  return !said.said && (gone[rank] ? elsewhere : said.early == 0 && (elsewhere || job->progress.ranks[rank].joined));
}

/* Why those that live do not go on; false: they do. *later: they may, once some have said so. */
static bool hindered(even_job *job, const bool *gone, even_text *why, bool *later) {
  int rank = -1;
  char words[EVEN_GENERATION_WORDS];
  size_t members = even_job_members(job);
  int least = job->params->least_ranks > 1 ? job->params->least_ranks : 1;
  size_t others = even_job_replace_free(job);
  if (members + others < (size_t)least) {
    even_text_format(why, "%zu are left, and --min-ranks is %d", members, least);
    if (others > 0) {
      even_text_format(why, "; only %zu can join them", others);
    }
    return true;
  }
  if (!even_generation_able(job->generation, gone, &rank, words)) {
    *later = may_say(job, rank, gone);
    even_text_format(why, "rank %d: %s", rank, words);
    return true;
  }
  if (job->lost_ns != 0 && !even_succession_leaves_out(job, job->lost_ns)) {
    *later = true; /* it may be this host that is cut off: then its ranks are ended, and others lead theirs */
    job->undecided_ns = 0;
    even_text_add(why, "most of the hosts are not heard");
    return true;
  }
  return false;
}

/* All that do not live: also those that ended well, for whom nobody waits any more. */
static bool *gone_of(const even_job *job) {
  bool *gone = NULL;
  if (EVEN_NEW_ARRAY(&gone, job->count) != EVEN_OK) {
    return NULL;
  }
  for (size_t i = 0; i < job->count; i++) {
    gone[i] = !is_member(job, i);
  }
  return gone;
}

void even_job_left_well(even_job *job) {
  if (job->generation == NULL || job->stage != EVEN_JOB_RUNS || even_job_members(job) == 0 ||
      even_generation_number(job->generation) == 0) {
    return;
  }
  bool *gone = gone_of(job);
  if (gone != NULL) {
    even_gifts_plan(job);
    (void)even_generation_lose(job->generation, gone);
    even_free(gone);
  }
}

static void go_on_without_missed(even_job *job, const bool *gone) {
  even_text left = EVEN_TEXT_EMPTY;
  even_text missed = EVEN_TEXT_EMPTY;
  even_job_replace_ask(job);
  even_gifts_plan(job);
  uint32_t number = even_generation_lose(job->generation, gone);
  even_boards_turn(job); /* before all else: they wait */
  even_job_name_members(job, &left);
  name_missed(job, &missed);
  for (size_t i = 0; i < job->count; i++) {
    if (job->ranks[i].missed) {
      job->lost[i] = true;
      if (!job->ranks[i].elsewhere) {
        (void)even_process_signal_group(job->ranks[i].pid, SIGKILL); /* workers that it has left */
      }
      even_job_tell_end(job, i);
    }
  }
  even_job_notice(job, "generation %u: %s go%s on without %s", number, even_text_string(&left),
                  even_job_members(job) == 1 ? "es" : "", even_text_string(&missed));
  job->did_without = true;
  even_job_tell_main_rank(job);
  for (size_t i = 0; i < job->count; i++) {
    if (job->ranks[i].missed) {
      job->ranks[i].missed = false;
      even_job_snapshot_finish(job, i); /* the others go on meanwhile */
      even_job_replace_lost(job, i);
    }
  }
  even_text_free(&left);
  even_text_free(&missed);
}

bool even_job_can_do_without(even_job *job, const bool *these, even_text *why, bool *later) {
  bool any = false;
  for (size_t i = 0; i < job->count; i++) {
    job->ranks[i].alive = job->ranks[i].alive && !these[i]; /* as if they had ended */
    any = any || these[i];
  }
  bool *gone = even_job_members(job) == 0 ? NULL : gone_of(job);
  bool can = any && gone != NULL && !hindered(job, gone, why, later);
  if (gone == NULL) {
    even_text_add(why, "nobody is left");
  }
  for (size_t i = 0; i < job->count; i++) {
    job->ranks[i].alive = job->ranks[i].alive || these[i];
  }
  even_free(gone);
  return can;
}

/* For all that are missed. True also where that is decided later. */
static bool decide(even_job *job) {
  even_text why = EVEN_TEXT_EMPTY;
  even_text missed = EVEN_TEXT_EMPTY;
  bool later = false;
  bool *gone = even_job_members(job) == 0 ? NULL : gone_of(job);
  if (gone == NULL) {
    return false;
  }
  bool goes_on = !hindered(job, gone, &why, &later);
  if (goes_on) {
    job->undecided_ns = job->lost_ns = 0;
    go_on_without_missed(job, gone);
  } else if (later && (job->undecided_ns == 0 || even_clock_ns() < job->undecided_ns)) {
    job->undecided_ns = job->undecided_ns == 0 ? even_clock_ns() + EVEN_JOB_HEARSAY_NS : job->undecided_ns;
    goes_on = true;
  } else {
    name_missed(job, &missed);
    even_job_notice(job, "the others cannot go on without %s: %s", even_text_string(&missed), even_text_string(&why));
  }
  even_free(gone);
  even_text_free(&why);
  even_text_free(&missed);
  return goes_on;
}

static void forget_missed(even_job *job) {
  job->undecided_ns = job->lost_ns = 0;
  for (size_t i = 0; i < job->count; i++) {
    job->ranks[i].missed = false;
  }
}

/* Of `rank`, and of those lost with its host, the caller says so. Those that were missed before have failed before. */
static void fail_undecided(even_job *job, size_t rank) {
  const char *host = job->ranks[rank].lost;
  for (size_t i = 0; i < job->count; i++) {
    const even_job_rank *other = &job->ranks[i];
    if (other->missed && i != rank && (host == NULL || other->lost != host)) {
      even_job_rank_failed(job, i);
    }
  }
}

/* How many steps the ranks have made, by who has made most. */
static uint64_t steps_made(even_job *job) {
  uint64_t most = 0;
  even_progress_read(&job->progress);
  for (size_t i = 0; i < job->count; i++) {
    const even_rank_progress *its = &job->progress.ranks[i];
    most = its->stepped && its->last_step + 1 > most ? its->last_step + 1 : most;
  }
  return most;
}

/* Whether it ended by an error of its place. Where that may be the script's as well, the others make the same step with
 * the same samples: the next who ends so before that is made shows that it is. */
static bool failed_for_its_place(even_job *job, size_t rank) {
  const even_fault_facts facts = even_job_facts(job, rank);
  even_place_blame blame = even_fault_blames_place(&facts);
  if (blame != EVEN_PLACE_SUSPECT && !even_fault_is_of_memory(&facts)) {
    return blame == EVEN_PLACE_BROKEN;
  }
  uint64_t steps = steps_made(job);
  if (job->suspected > steps) {
    even_job_notice(job,
                    "rank %zu has ended like one before it, and no step was made between: it is taken for an error of "
                    "the script's, and the others do not go on",
                    rank);
    return false;
  }
  job->suspected = steps + 1;
  return true;
}

bool even_job_goes_on_without(even_job *job, size_t rank) {
  const even_job_rank *own = &job->ranks[rank];
  if (job->generation == NULL || job->stage != EVEN_JOB_RUNS) {
    return false;
  }
  if (job->lost[rank]) { /* with another one of its host, or under an earlier leader */
    return true;
  }
  if (own->stopped_by_agent ||
      !(own->end.signal != 0 || own->lost != NULL || even_job_is_new(job, rank) || failed_for_its_place(job, rank))) {
    return false;
  }
  for (size_t i = 0; i < job->count; i++) {
    even_job_rank *other = &job->ranks[i];
    bool with_host = own->lost != NULL && other->lost == own->lost && !other->alive;
    other->missed = other->missed || i == rank || (with_host && !job->lost[i] && !even_job_is_outside(job, i));
  }
  if (own->lost != NULL) {
    job->lost_ns = even_clock_ns();
  }
  bool goes_on = decide(job);
  if (!goes_on) {
    fail_undecided(job, rank);
    forget_missed(job);
  }
  return goes_on;
}

void even_job_shrink_tick(even_job *job) {
  if (!even_succession_acts(job)) { /* who is left another one may decide */
    job->undecided_ns = job->undecided_ns == 0 ? 0 : even_clock_ns() + EVEN_JOB_HEARSAY_NS;
    return;
  }
  even_job_stands_tick(job);
  if (job->undecided_ns == 0) {
    return;
  }
  if (job->stage != EVEN_JOB_RUNS) {
    forget_missed(job);
  } else if (!decide(job)) {
    for (size_t i = 0; i < job->count; i++) {
      if (job->ranks[i].missed) {
        even_job_rank_failed(job, i);
      }
    }
    forget_missed(job);
  }
}
