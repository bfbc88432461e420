/* Processes that join the members: in the places of lost ranks (--recovery replace), spares that wait and ones that are
 * started anew, and in places that nobody had, of hosts that join (growth.h). They are outside until all members stand
 * between two steps; then a new generation has them, too. */
#include "base/alloc.h"
#include "base/fail.h"
#include "fault/generation.h"
#include "orchestrator/boards.h"
#include "orchestrator/follower.h"
#include "orchestrator/gifts.h"
#include "orchestrator/hangs.h"
#include "orchestrator/job.h"
#include "orchestrator/pauses.h"
#include "orchestrator/place.h"
#include "orchestrator/remote.h"
#include "orchestrator/stragglers.h"
#include "orchestrator/succession.h"
#include "os/clock.h"

#include <stdio.h>
#include <string.h>

/* Until another process is started in a place in which so many have ended: at once, then these and ever longer. */
static const uint64_t first_pause_ns = 10000000000u;
static const uint64_t longest_pause_ns = 600000000000u;

static size_t world(const even_job *job) {
  return job->count - (size_t)job->params->spares;
}

/* A place that was kept, of a host that has come with it: nobody has joined from there yet. */
static bool adds_place(const even_job *job, size_t rank) {
  return rank >= job->count - (size_t)job->params->kept && job->places[rank].comes;
}

/* So many members there may be: a spare takes a place, and adds none. */
static size_t most_members(const even_job *job) {
  size_t most = world(job);
  for (size_t i = job->count - (size_t)job->params->kept; i < job->count; i++) {
    most += even_job_host_reached(job, i) && !adds_place(job, i) ? 1 : 0;
  }
  return most;
}

bool even_job_takes_in(const even_job *job) {
  return job->params->replace || job->params->grows;
}

even_status even_job_replace_open(even_job *job) {
  if (job->generation == NULL || !even_job_takes_in(job)) {
    return EVEN_OK;
  }
  return EVEN_NEW_ARRAY(&job->places, job->count);
}

void even_job_replace_close(even_job *job) {
  even_free(job->places);
  job->places = NULL;
}

void even_job_replace_begin(even_job *job, bool *members) {
  for (size_t i = 0; i < job->count; i++) {
    members[i] = i < world(job) && !job->late;
    if (job->places != NULL) {
      job->places[i] = (struct even_job_place){.outside = !members[i]};
    }
  }
}

bool even_job_is_outside(const even_job *job, size_t rank) {
  return job->places != NULL && job->places[rank].outside;
}

bool even_job_offers(const even_job *job, size_t rank) {
  return even_job_is_outside(job, rank) && even_generation_offers(job->generation, (int)rank);
}

bool even_job_is_new(even_job *job, size_t rank) {
  if (job->places == NULL || !job->places[rank].new_here) {
    return false;
  }
  even_progress_read(&job->progress);
  return !job->progress.ranks[rank].stepped;
}

static bool is_member(const even_job *job, size_t rank) {
  return job->ranks[rank].alive && !even_job_is_outside(job, rank);
}

bool even_job_has_state(even_job *job, size_t rank) {
  return is_member(job, rank) && (!even_job_is_new(job, rank) || even_generation_stands(job->generation, (int)rank));
}

/* Whether somebody can give the state of training to who takes a place. */
static bool any_gives(even_job *job) {
  for (size_t i = 0; i < job->count; i++) {
    if (even_job_has_state(job, i)) {
      return true;
    }
  }
  return false;
}

/* Over the network or, where an attempt has outlasted its leader and numbers of hosts are others now, from a member of
 * its own host. */
bool even_job_replace_could(const even_job *job, size_t rank) {
  bool near = job->gifts != NULL || job->most_groups < 2;
  for (size_t i = 0; !near && i < job->count; i++) {
    near = i != rank && is_member(job, i) && even_job_host_number(job, i) == even_job_host_number(job, rank);
  }
  return near && even_job_host_reached(job, rank);
}

size_t even_job_replace_free(const even_job *job) {
  size_t places = 0;
  size_t members = job->params->replace ? even_job_members(job) : 0;
  size_t most = most_members(job);
  size_t room = most > members ? most - members : 0;
  for (size_t i = 0; members > 0 && job->places != NULL && i < job->count; i++) {
    places += !is_member(job, i) && even_job_replace_could(job, i) ? 1 : 0;
  }
  return places < room ? places : room;
}

size_t even_job_members(const even_job *job) {
  size_t members = 0;
  for (size_t i = 0; i < job->count; i++) {
    members += is_member(job, i) ? 1 : 0;
  }
  return members;
}

bool even_job_replace_is_full(const even_job *job) {
  return job->places != NULL && even_job_members(job) >= most_members(job);
}

/* ---- ends ---- */

static uint64_t pause_after(unsigned endings) {
  return even_pause_after(first_pause_ns, longest_pause_ns, endings < 2 ? 0 : endings - 1);
}

void even_job_replace_lost(even_job *job, size_t rank) {
  if (job->places == NULL) {
    return;
  }
  struct even_job_place *place = &job->places[rank];
  bool again = job->params->replace || place->comes;
  const even_fault_facts facts = even_job_facts(job, rank);
  bool broken = even_fault_blames_place(&facts) == EVEN_PLACE_BROKEN; /* what is started there ends soon, too */
  place->endings += broken && place->endings == 0 ? 2 : job->ranks[rank].lost == NULL ? 1 : 0;
  uint64_t pause = job->ranks[rank].lost != NULL ? 0 : pause_after(place->endings);
  place->outside = true;
  place->new_here = false;
  uint64_t rest = job->ranks[rank].slow ? even_stragglers_rest_ns(job->stragglers, rank) : 0;
  place->again_ns = again ? even_clock_ns() + (rest > pause ? rest : pause) : 0;
  if (again && pause > 0) {
    char why[48];
    (void)snprintf(why, sizeof why, "its process has ended %u times", place->endings);
    even_job_notice(job, "rank %zu (%s) is set aside for %.0f s: %s", rank, facts.device, (double)pause * 1e-9,
                    broken ? "by its error its device is at fault" : why);
  }
}

bool even_job_outside_ended(even_job *job, size_t rank) {
  if (!even_job_is_outside(job, rank)) {
    return false;
  }
  job->lost[rank] = true; /* nobody misses it: it is neither why an attempt ends, nor told of then */
  if (job->stage == EVEN_JOB_RUNS && even_job_members(job) > 0) {
    if (!job->ranks[rank].elsewhere) {
      (void)even_process_signal_group(job->ranks[rank].pid, SIGKILL); /* workers that it has left */
    }
    even_job_tell_end(job, rank);
    even_job_notice(job, "that was no member of the training yet: the others go on as they are");
    even_job_replace_lost(job, rank);
  }
  return true;
}

void even_job_replace_adopt(even_job *job, size_t rank, bool member) {
  if (job->places == NULL) {
    return;
  }
  job->places[rank].outside = !member;
  if (!member && !job->ranks[rank].alive && job->ranks[rank].pid != 0 && !job->ranks[rank].elsewhere) {
    even_job_replace_lost(job, rank);
  }
}

/* Who has let it in, or had others go on without it, may have been killed before that was noted in its place. */
void even_job_replace_restore(even_job *job, size_t rank, const struct even_job_place *noted, bool member) {
  struct even_job_place *place = job->places == NULL ? NULL : &job->places[rank];
  if (place == NULL) {
    return;
  }
  *place = *noted;
  if (member && place->outside) {
    place->outside = place->comes = false;
    place->new_here = true;
  }
  const even_job_rank *own = &job->ranks[rank];
  bool gone = !member && !own->alive && own->pid != 0 && (place->outside || job->lost[rank]);
  if (gone && place->again_ns == 0 && job->follower == NULL) {
    even_job_replace_lost(job, rank);
  }
}

/* Kept for hosts that may join: nobody misses who is not there. */
void even_job_replace_keep_free(even_job *job) {
  for (size_t i = 0; i < job->count; i++) {
    if (even_job_is_nobodys(job, i)) {
      job->lost[i] = true;
      job->order[job->ended++] = i;
    }
  }
}

void even_job_replace_give(even_job *job, size_t first, size_t count) {
  for (size_t i = first; i < first + count; i++) {
    job->places[i] = (struct even_job_place){.outside = true, .comes = true, .again_ns = even_clock_ns()};
  }
}

/* ---- starts ---- */

static void out_of_order(even_job *job, size_t rank) {
  size_t kept = 0;
  for (size_t i = 0; i < job->ended; i++) {
    if (job->order[i] != rank) {
      job->order[kept++] = job->order[i];
    }
  }
  job->ended = kept;
}

static even_status start_process(even_job *job, size_t rank) {
  even_job_reset_rank(job, rank);
  out_of_order(job, rank);
  even_boards_vacate(job, rank);
  even_progress_forget(&job->progress, rank);
  even_stragglers_begin_rank(job->stragglers, rank);
  even_hangs_begin_rank(job->hangs, rank);
  return job->ranks[rank].elsewhere ? even_job_host_fill(job, rank) : even_job_start_rank(job, rank);
}

void even_job_replace_started(even_job *job, size_t rank) {
  if (even_job_is_outside(job, rank) && job->places[rank].filled) {
    even_job_notice(job, "rank %zu: a process %s (process %ld)", rank,
                    job->places[rank].comes ? "starts for it" : "takes its place", (long)job->ranks[rank].pid);
  }
}

static void start(even_job *job, size_t rank) {
  even_job_rank *own = &job->ranks[rank];
  job->places[rank].again_ns = 0;
  job->places[rank].filled = true;
  if (start_process(job, rank) == EVEN_OK) {
    if (!own->elsewhere) { /* else its agent tells */
      even_job_replace_started(job, rank);
    }
    return;
  }
  even_job_notice(job, "rank %zu: no process can take its place: %s", rank, even_error_last()->what);
  even_error_clear();
  if (!own->alive) {
    job->order[job->ended++] = rank;
    even_job_replace_lost(job, rank);
  }
}

/* Those of a host that is lost wait until it is back. */
static void start_those_due(even_job *job) {
  uint64_t now = even_clock_ns();
  for (size_t i = 0; i < job->count; i++) {
    if (!job->ranks[i].alive && job->places[i].again_ns != 0 && now >= job->places[i].again_ns &&
        even_job_replace_could(job, i)) {
      start(job, i);
    }
  }
}

even_status even_job_replace_fill(even_job *job, size_t rank) {
  if (job->places == NULL || rank >= job->count || !even_job_is_here(job, rank) || job->ranks[rank].alive) {
    return even_fail(EVEN_ERR_INPUT, "a process shall take the place of rank %zu, which is not free here", rank);
  }
  even_job_rank *own = &job->ranks[rank];
  job->places[rank].outside = true;
  if (start_process(job, rank) != EVEN_OK) {
    even_job_notice(job, "rank %zu: no process can take its place: %s", rank, even_error_last()->what);
    even_error_clear();
    if (!own->alive) {
      own->end.code = 1;
      job->order[job->ended++] = rank;
      even_job_follower_tell_end(job, own);
    }
  }
  return EVEN_OK;
}

void even_job_replace_joined(even_job *job, size_t rank) {
  if (job->places != NULL) {
    job->places[rank].outside = false;
    even_hangs_begin_rank(job->hangs, rank);
  }
}

bool even_job_replace_waits(const even_job *job) {
  return job->follower != NULL && job->places != NULL && job->stage == EVEN_JOB_RUNS;
}

/* ---- joining ---- */

/* Whether ranks of the host are missing, those that join counted in. */
static bool misses_ranks(const even_job *job, size_t host, const bool *joining) {
  size_t there = 0;
  size_t began = 0;
  for (size_t i = 0; i < job->count; i++) {
    if (even_job_host_number(job, i) == host) {
      began += i < world(job) ? 1 : 0;
      there += is_member(job, i) || joining[i] ? 1 : 0;
    }
  }
  return there < began;
}

/* Of those that offer themselves, and whom somebody can give the state, as many as there are places for, *count of
 * them: first those of hosts whose own ranks are missing, then others. */
static void choose(even_job *job, bool *joining, size_t *count) {
  size_t members = even_job_members(job);
  size_t most = most_members(job);
  bool given = any_gives(job);
  *count = 0;
  for (size_t i = 0; i < 2 * job->count && given; i++) {
    size_t rank = i % job->count;
    bool adds = adds_place(job, rank);
    if ((adds || members + *count < most) && !joining[rank] && job->ranks[rank].alive && even_job_offers(job, rank) &&
        even_job_replace_could(job, rank) &&
        (i >= job->count || misses_ranks(job, even_job_host_number(job, rank), joining))) {
      joining[rank] = true;
      (*count)++;
      most += adds ? 1 : 0;
    }
  }
}

bool even_job_stands(const even_job *job, size_t rank) {
  return job->places != NULL && job->ranks[rank].alive && even_generation_stands(job->generation, (int)rank);
}

static bool all_stand(const even_job *job) {
  for (size_t i = 0; i < job->count; i++) {
    if (is_member(job, i) && !even_job_stands(job, i)) {
      return false;
    }
  }
  return true;
}

bool even_job_any_stands(const even_job *job) {
  for (size_t i = 0; i < job->count; i++) {
    if (even_job_stands(job, i)) {
      return true;
    }
  }
  return false;
}

static void let_join(even_job *job, const bool *joining) {
  even_text old = EVEN_TEXT_EMPTY;
  even_text fresh = EVEN_TEXT_EMPTY;
  size_t count = 0;
  even_job_name_members(job, &old);
  for (size_t i = 0; i < job->count; i++) {
    if (joining[i]) {
      even_text_format(&fresh, "%s%zu", count++ == 0 ? "" : ", ", i);
      job->places[i].outside = false;
      job->places[i].new_here = true;
      job->places[i].comes = false;
      job->lost[i] = false;
      even_hangs_begin_rank(job->hangs, i);
    }
  }
  even_gifts_plan(job);
  uint32_t number = even_generation_grow(job->generation, joining);
  even_job_notice(job, "generation %u: rank%s %s join%s %s", number, count == 1 ? "" : "s", even_text_string(&fresh),
                  count == 1 ? "s" : "", even_text_string(&old));
  even_job_tell_main_rank(job);
  even_text_free(&old);
  even_text_free(&fresh);
}

static size_t least_members(const even_job *job) {
  return job->params->least_ranks > 1 ? (size_t)job->params->least_ranks : 1;
}

void even_job_replace_ask(even_job *job) {
  if (job->places != NULL && even_job_members(job) < least_members(job)) {
    even_generation_ask(job->generation, EVEN_WISH_SAVE);
  }
}

static void tell_too_few(even_job *job, size_t members, size_t least) {
  if (!job->too_few_told) {
    job->too_few_told = true;
    even_job_notice(job,
                    "%zu rank%s left, and --min-ranks is %zu: the training saves its state after this step, and "
                    "waits for others",
                    members, members == 1 ? " is" : "s are", least);
  }
}

static void look_for_joiners(even_job *job, bool *joining) {
  size_t least = least_members(job);
  size_t members = even_job_members(job);
  size_t count = 0;
  choose(job, joining, &count);
  job->awaits_joiner = count > 0;
  if (count > 0 && members + count >= least) {
    job->too_few_told = false;
    if (all_stand(job)) {
      let_join(job, joining);
    } else {
      even_generation_ask(job->generation, EVEN_WISH_STAND);
    }
  } else if (members < least) {
    tell_too_few(job, members, least);
    even_generation_ask(job->generation, EVEN_WISH_SAVE);
  } else {
    even_generation_ask(job->generation, EVEN_WISH_NOTHING);
    if (even_job_any_stands(job)) { /* who could have joined has ended */
      even_gifts_plan(job);
      (void)even_generation_grow(job->generation, NULL);
    }
  }
}

/* Those that wait have nobody left to join. */
static void end_outsiders(even_job *job) {
  bool elsewhere = false;
  for (size_t i = 0; i < job->count; i++) {
    even_job_rank *rank = &job->ranks[i];
    if (rank->alive && rank->elsewhere) {
      elsewhere = elsewhere || !rank->stopped_by_agent;
    } else if (rank->alive) {
      (void)even_process_signal_group(rank->pid, SIGKILL);
    }
    rank->stopped_by_agent = rank->stopped_by_agent || rank->alive;
  }
  if (elsewhere) {
    even_job_hosts_signal(job, SIGKILL, true, true);
  }
}

void even_job_replace_tick(even_job *job) {
  bool *joining = NULL;
  if (job->places == NULL || job->follower != NULL || job->stage != EVEN_JOB_RUNS || job->alive == 0 ||
      !even_succession_acts(job)) {
    return;
  }
  if (even_job_members(job) == 0) {
    end_outsiders(job);
    return;
  }
  if (EVEN_NEW_ARRAY(&joining, job->count) != EVEN_OK) {
    even_error_clear(); /* at the next tick */
    return;
  }
  start_those_due(job);
  look_for_joiners(job, joining);
  even_free(joining);
}
