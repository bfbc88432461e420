/* The ranks of a job under `evenstep chaos`: who lives, who trains, to whom a fault comes; and, with --recovery, what
 * became of the others after it. */
#include "base/alloc.h"
#include "base/fail.h"
#include "cli/chaos_hosts.h"
#include "monitor/survival.h"
#include "os/clock.h"

#include <stdio.h>
#include <string.h>

/* So long after the last loss the next one waits for another process in its place. */
#define SETTLE_NS ((uint64_t)3 * 1000000000u)
/* What comes so soon before an attempt's end may be why it ended. */
#define NEAR_NS ((uint64_t)10 * 1000000000u)
enum { MOST_LINE = 160 };

even_status even_chaos_members_open(even_chaos_job *job) {
  even_chaos_members *members = &job->members;
  if (job->places == 0) {
    return EVEN_OK;
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&members->of, (size_t)job->places));
  return EVEN_NEW_ARRAY(&members->victims, job->faults * (size_t)job->places);
}

void even_chaos_members_close(even_chaos_job *job) {
  even_free(job->members.of);
  even_free(job->members.victims);
  job->members = (even_chaos_members){NULL, NULL, 0, 0};
}

static uint64_t last_end(const even_state_rank *rank) {
  return rank->last_attempt == 0 ? 0 : rank->window[rank->last_step % EVEN_STATE_WINDOW].end_ns;
}

void even_chaos_members_look(even_chaos_job *job) {
  const even_state *state = job->history == NULL ? NULL : even_history_state(job->history);
  for (int i = 0; state != NULL && i < job->places && i < state->ranks; i++) {
    even_chaos_member *one = &job->members.of[i];
    if (one->pid != state->rank[i].pid) {
      *one = (even_chaos_member){.pid = state->rank[i].pid, .before_ns = last_end(&state->rank[i])};
    }
  }
}

bool even_chaos_find_rank(const even_chaos_job *job, int rank, even_process_stat *out) {
  const even_state *state = even_history_state(job->history);
  pid_t pid = rank < state->ranks ? state->rank[rank].pid : 0;
  if (pid > 0 && even_chaos_host_of(job, rank) > 0) { /* its number means nothing here: as the history has it */
    *out = (even_process_stat){.pid = pid, .state = 'S', .cpu = -1};
    return true;
  }
  return pid > 0 && even_process_stat_read(pid, out) == 0 && out->state != 'Z' && out->state != 'X';
}

bool even_chaos_has_stepped(const even_chaos_job *job, int rank) {
  const even_state *state = even_history_state(job->history);
  const even_state_rank *at = &state->rank[rank];
  return at->last_attempt == (uint32_t)state->attempt + 1 && last_end(at) > job->members.of[rank].before_ns;
}

/* What goes by memory that processes of this host share comes to its ranks alone. */
static bool is_of_this_host(even_chaos_kind kind) {
  return kind == EVEN_CHAOS_NAN || kind == EVEN_CHAOS_CLOCK;
}

bool even_chaos_find_victim(even_chaos_job *job, bool trains, even_process_stat *out) {
  const int planned = job->plan[job->next].rank;
  const bool here = job->hosts != NULL && is_of_this_host(job->plan[job->next].kind);
  const int all = job->recovers ? job->places : even_chaos_ranks_led(job);
  const int looked = job->recovers || here ? all : 1;
  for (int i = 0; i < looked; i++) {
    int rank = (planned + i) % all;
    if ((!here || even_chaos_host_of(job, rank) == 0) && even_chaos_find_rank(job, rank, out) &&
        (!job->recovers || !trains || even_chaos_has_stepped(job, rank))) {
      job->victim = rank;
      return true;
    }
  }
  return false;
}

/* In an attempt in which nobody was lost: whether all ranks live, and those that make steps have made one since the
 * last fault. */
static bool whole_trains(const even_chaos_job *job) {
  const even_state *state = even_history_state(job->history);
  bool any = false;
  for (int i = 0; i < even_chaos_ranks_led(job); i++) {
    even_process_stat facts;
    if (!even_chaos_find_rank(job, i, &facts)) {
      return false;
    }
    if (state->rank[i].last_attempt == 0) {
      continue; /* one that does not train, of a job in which others do */
    }
    if (last_end(&state->rank[i]) <= job->ended_ns) { /* its own last one */
      return false;
    }
    any = true;
  }
  return any;
}

/* The same of those that are left. With --recovery replace most faults wait until all places are filled again, for a
 * while: who is set aside is not waited for. */
static bool rest_trains(const even_chaos_job *job) {
  enum { ONE_IN = 4 };
  const even_state *state = even_history_state(job->history);
  int training = 0;
  for (int i = 0; i < job->places && i < state->ranks; i++) {
    even_process_stat facts;
    if (state->rank[i].pid == 0 || !even_chaos_has_stepped(job, i)) {
      continue; /* lost; or it waits */
    }
    if (!even_chaos_find_rank(job, i, &facts) || last_end(&state->rank[i]) <= job->ended_ns) {
      return false;
    }
    training++;
  }
  bool waits = job->replaces && training < job->ranks && (job->plan[job->next].dice >> 24) % ONE_IN != 0 &&
               even_clock_ns() - job->ended_ns < SETTLE_NS;
  return training > 0 && !waits;
}

bool even_chaos_trains(const even_chaos_job *job) {
  const even_state *state = even_history_state(job->history);
  return job->recovers && state->lost_words[0] != '\0' ? rest_trains(job) : whole_trains(job);
}

void even_chaos_add_victim(even_chaos_job *job, pid_t pid) {
  even_chaos_members *members = &job->members;
  if (members->victims != NULL && members->count < job->faults * (size_t)job->places) {
    members->victims[members->count++] = (even_chaos_victim){.fault = job->next, .pid = pid};
  }
}

/* ---- what became of the others ---- */

/* Of the agent's words since the fault, the line in which it says why nobody went on. */
static void take_reason(const even_chaos_job *job, even_chaos_done *done) {
  static const char says[] = "cannot go on without";
  const even_text *said = &job->agent.complaint;
  const char *at = said->length > done->heard ? strstr(said->data + done->heard, says) : NULL;
  if (at != NULL) {
    size_t length = strcspn(at, "\n");
    (void)snprintf(done->why, sizeof done->why, "%.*s", length < MOST_LINE ? (int)length : MOST_LINE, at);
  }
}

/* Whether something else than the fault may have ended the attempt. */
static bool has_other_cause(const even_chaos_job *job, size_t fault, uint64_t ended_ns) {
  for (size_t i = 0; i < job->faults; i++) {
    const even_chaos_done *other = &job->done[i];
    if (i != fault && other->injected && other->at_ns + NEAR_NS > job->done[fault].at_ns && other->at_ns < ended_ns) {
      return true;
    }
  }
  return false;
}

static bool takes_a_rank_alone(even_chaos_kind kind) {
  return kind == EVEN_CHAOS_KILL || kind == EVEN_CHAOS_STOP || kind == EVEN_CHAOS_FLIP || kind == EVEN_CHAOS_TORN ||
         kind == EVEN_CHAOS_PORT;
}

static void take_survival(even_chaos_job *job, size_t fault, const even_survival *found) {
  even_chaos_done *done = &job->done[fault];
  if (done->judged) {
    return; /* one of several ranks of a host: the first tells of those that are left */
  }
  done->judged = true;
  done->trained = found->trained && found->others > 0;
  done->outcome = found->outcome;
  done->again_ns = found->again_ns;
  done->stepped_ns = found->stepped_ns;
  done->joined_ns = found->joined_ns;
  if (found->outcome != EVEN_SURVIVAL_STARTED_AGAIN) {
    return;
  }
  take_reason(job, done);
  if (done->trained && done->why[0] == '\0' && takes_a_rank_alone(job->plan[fault].kind) &&
      !has_other_cause(job, fault, found->ended_ns)) {
    done->broken = true;
    size_t length = strlen(done->words);
    (void)snprintf(done->words + length, sizeof done->words - length,
                   ": all began again, and nothing said why the others did not go on");
  }
}

even_status even_chaos_judge(even_chaos_job *job) {
  even_chaos_members *members = &job->members;
  size_t count = members->count - members->judged;
  even_survival *found = NULL;
  char wrong[EVEN_SURVIVAL_WORDS];
  bool gaps = false;
  if (!job->recovers || job->history == NULL || even_history_read(job->history) != EVEN_OK) {
    even_error_clear();
    return EVEN_OK;
  }
  for (size_t i = 0; i < job->faults; i++) {
    gaps = gaps || (job->done[i].injected && job->plan[i].kind == EVEN_CHAOS_DISK);
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&found, count + 1));
  for (size_t i = 0; i < count; i++) {
    const even_chaos_victim *victim = &members->victims[members->judged + i];
    found[i] = (even_survival){.pid = victim->pid, .at_ns = job->done[victim->fault].at_ns};
  }
  gaps = gaps || even_history_state(job->history)->lost_records > 0;
  even_status status = even_survival_find(job->history, found, count, gaps, wrong);
  for (size_t i = 0; i < count && status == EVEN_OK; i++) {
    take_survival(job, members->victims[members->judged + i].fault, &found[i]);
  }
  if (status == EVEN_OK && wrong[0] != '\0' && job->wrong[0] == '\0') {
    (void)snprintf(job->wrong, sizeof job->wrong, "%s", wrong);
  }
  members->judged = members->count;
  even_free(found);
  return status;
}
