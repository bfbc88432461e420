/* How ranks end, and what follows from it for their attempt: who is asked to end, when, and how sternly. */
#include "orchestrator/follower.h"
#include "orchestrator/job.h"
#include "orchestrator/job_attempt.h"
#include "orchestrator/legacy.h"
#include "orchestrator/outlast.h"
#include "orchestrator/remote.h"
#include "orchestrator/succession.h"
#include "os/clock.h"
#include "os/process_stat.h"
#include "os/process_threads.h"

#include <stdio.h>
#include <string.h>

/* How long ranks may take to end when asked, and again when told. */
static const uint64_t grace_interrupt_ns = 10000000000u;
static const uint64_t grace_failure_ns = 5000000000u;

void even_job_signal_ranks(even_job *job, int number, bool groups) {
  for (size_t i = 0; i < job->count; i++) {
    if (job->ranks[i].alive && !job->ranks[i].elsewhere) {
      (void)(groups ? even_process_signal_group(job->ranks[i].pid, number)
                    : even_process_signal_as_parent(job->ranks[i].pid, number));
    }
  }
}

/* `by`: " by SIGTSTP", or "" where that is not known. Told once. */
static void tell_stopped(even_job *job, even_job_rank *rank, const char *by) {
  rank->was_stopped = true;
  even_job_notice(job,
                  "rank %d (process %ld) stands still: it was stopped%s; `kill -CONT %ld` lets it go on; ranks "
                  "that wait for it fail soon (EVENSTEP_STOP_GRACE)",
                  rank->output.rank, (long)rank->pid, by, (long)rank->pid);
}

/* Whether a rank that somebody stopped still stands, now that another has failed: it cannot end by itself. That it was
 * stopped may not have been told yet: the kernel tells of children in their order, not in that of their ends. */
static bool any_stands(even_job *job) {
  bool any = false;
  for (size_t i = 0; i < job->count; i++) {
    even_process_stat facts;
    even_job_rank *rank = &job->ranks[i];
    if (!rank->alive) {
      continue; /* one that was ended for it did */
    }
    if (rank->elsewhere) {
      rank->stood_still = rank->stands;
    } else {
      rank->stood_still =
          !even_job_guardian_holds(job) && even_process_stat_read(rank->pid, &facts) == 0 && facts.state == 'T';
    }
    if (rank->stood_still && !rank->was_stopped) {
      tell_stopped(job, rank, "");
    }
    any = any || rank->stood_still;
  }
  return any;
}

/* Where this agent may not act, another one's ranks may run: these must not, not even to end well. */
static void move_to(even_job *job, even_job_stage stage, int number, bool groups, uint64_t grace_ns) {
  if (number != SIGKILL && !even_succession_acts(job)) {
    move_to(job, EVEN_JOB_KILLED, SIGKILL, true, grace_ns);
    return;
  }
  for (size_t i = 0; i < job->count; i++) {
    job->ranks[i].stopped_by_agent = job->ranks[i].stopped_by_agent || job->ranks[i].alive;
  }
  uint64_t now = even_clock_ns();
  job->killed_ns = stage == EVEN_JOB_KILLED && job->stage != EVEN_JOB_KILLED ? now : job->killed_ns;
  job->stage = stage;
  job->deadline_ns = now + grace_ns;
  even_job_generations_refuse(job);
  if (job->outlast != NULL) { /* before they hear of it: no later agent is to train on with them */
    even_legacy_whole(job->params->legacy, false);
  }
  even_job_signal_ranks(job, number, groups);
  if (number != SIGKILL) {
    even_job_signal_ranks(job, SIGCONT, groups); /* one that stands still cannot end itself */
  }
  even_job_hosts_signal(job, number, groups, true);
}

/* At once: why, and what it had said last, is told when all have ended. */
static void tell_killed(even_job *job, const even_job_rank *rank) {
  if (rank->end.signal != 0 && !rank->stopped_by_agent) {
    even_job_notice(job, "rank %d (process %ld) has ended by %s: the others are ended", rank->output.rank,
                    (long)rank->pid, even_signal_name(rank->end.signal));
  }
}

static void kill_all(even_job *job) {
  move_to(job, EVEN_JOB_KILLED, SIGKILL, true, grace_failure_ns);
}

/* Where in the kernel a process is: the first of its threads that waits there and hears no signal, else its first. */
static void find_wait(pid_t pid, char *out, size_t bytes) {
  even_text lines = EVEN_TEXT_EMPTY;
  even_process_threads_describe(pid, &lines);
  const char *text = even_text_string(&lines);
  const char *from = strstr(text, ": state D");
  while (from != NULL && from > text && from[-1] != '\n') {
    from--;
  }
  from = from == NULL ? text : from;
  (void)snprintf(out, bytes, "%.*s", (int)strcspn(from, "\n"), from);
  even_text_free(&lines);
}

void even_job_tell_unending(even_job *job, size_t rank, uint64_t since_ns, const char *then) {
  char where[160];
  find_wait(job->ranks[rank].pid, where, sizeof where);
  even_job_notice(job,
                  "rank %zu (process %ld) was killed %.0f s ago and has not ended: %s; it ends when what it waits for "
                  "in the kernel (a disk, a file server, a driver) answers (dmesg; `umount -f` of a lost server), or "
                  "with a restart of its machine: %s",
                  rank, (long)job->ranks[rank].pid, (double)since_ns * 1e-9,
                  where[0] == '\0' ? "/proc says nothing of it" : where, then);
}

/* SIGKILL ends whatever a process does, but not a wait in the kernel that no signal ends. Each is told once. */
static void tell_unending(even_job *job) {
  uint64_t since = even_clock_ns() - job->killed_ns;
  if (job->stage != EVEN_JOB_KILLED || since < grace_failure_ns) {
    return;
  }
  for (size_t i = 0; i < job->count; i++) {
    even_job_rank *rank = &job->ranks[i];
    if (!rank->alive || rank->elsewhere || rank->pid <= 0 || rank->unending) {
      continue;
    }
    rank->unending = true;
    even_job_tell_unending(job, i, since, "the job waits for it");
  }
}

void even_job_check_deadline(even_job *job) {
  tell_unending(job);
  if (job->stage == EVEN_JOB_RUNS || job->alive == 0 || even_clock_ns() < job->deadline_ns) {
    return;
  }
  if (job->stage == EVEN_JOB_SETTLES) {
    move_to(job, EVEN_JOB_TERMINATED, SIGTERM, false, grace_failure_ns);
  } else if (job->stage == EVEN_JOB_ASKED) {
    even_job_notice(job, "%zu ranks have not ended yet: sending SIGTERM", job->alive);
    move_to(job, EVEN_JOB_TERMINATED, SIGTERM, false, grace_failure_ns);
  } else {
    kill_all(job);
  }
}

bool even_job_ended_between(even_job *job, int *exit_code) {
  int number = even_signals_end_pending();
  if (job->draining == 0 && number == SIGTERM && job->params->notice_seconds > 0) {
    even_job_drain_between(job, &(even_notice){.signal = number, .what = ""});
  }
  if (job->draining != 0) { /* by notice: now, or while ranks were waited for */
    *exit_code = EVEN_SAVED_AND_ENDED;
    return true;
  }
  if (number != 0) { /* that is the news, not the checkpoint half read, or the host waited for */
    even_job_interrupted(job, number);
    *exit_code = 128 + job->interrupted;
  }
  return number != 0;
}

void even_job_end_by_user(even_job *job, int number) {
  bool again = number == SIGINT && ++job->interrupts > 1; /* whatever signal came before */
  job->end_signals++;
  even_job_interrupted(job, number);
  if (again) {
    even_job_notice(job, "interrupted again: killing the ranks");
    kill_all(job);
    return;
  }
  if (number == SIGINT) {
    even_job_notice(job, "interrupted: waiting up to %d s for the ranks to end (again: at once)",
                    (int)(grace_interrupt_ns / 1000000000u));
  }
  if (job->stage == EVEN_JOB_RUNS) {
    even_job_flights_take(job);
  }
  if (job->stage <= EVEN_JOB_ASKED) {
    /* as a terminal does, to the whole group for Ctrl-C; otherwise to the ranks alone, as torchrun does */
    move_to(job, number == SIGINT ? EVEN_JOB_ASKED : EVEN_JOB_TERMINATED, number, number == SIGINT, grace_interrupt_ns);
  }
  if (job->flights_told) {
    even_job_flights_tell(job);
  }
}

void even_job_end_ranks(even_job *job, int number, bool groups) {
  even_job_stage stage = number == SIGKILL ? EVEN_JOB_KILLED : number == SIGINT ? EVEN_JOB_ASKED : EVEN_JOB_TERMINATED;
  if (job->stage == EVEN_JOB_RUNS) {
    (void)any_stands(job); /* as it is before our signal */
  }
  move_to(job, stage, number, groups, number == SIGINT ? grace_interrupt_ns : grace_failure_ns);
}

static void keep_end(even_job *job, even_job_rank *rank, const even_process_end *end) {
  rank->alive = false;
  rank->end = *end;
  even_job_drain_ended(job, rank);
  job->order[job->ended++] = (size_t)(rank - job->ranks);
  job->alive--;
  even_outlast_settle(job); /* at once: nobody else can learn how it ended */
  even_rank_output_finish(&rank->output);
  even_outlast_ended(job, (size_t)(rank - job->ranks));
  if (job->params->observer.rank_gone != NULL) {
    job->params->observer.rank_gone(job->params->observer.context, rank->output.rank);
  }
  if (rank->output.log_status != EVEN_OK) {
    even_job_notice(job, "the log of rank %d is not whole: %s", rank->output.rank,
                    even_status_text(rank->output.log_status));
  }
}

void even_job_rank_failed(even_job *job, size_t rank) {
  const even_fault_facts facts = even_job_facts(job, rank);
  bool secondary = even_fault_is_secondary(&facts);
  bool first = job->stage == EVEN_JOB_RUNS;
  if (first) {
    tell_killed(job, &job->ranks[rank]);
    even_job_flights_take(job);
  }
  bool stands = first && any_stands(job);
  if (job->stage == EVEN_JOB_RUNS && secondary && !stands) {
    job->stage = EVEN_JOB_SETTLES;
    even_job_generations_refuse(job);
    job->deadline_ns = even_clock_ns() + grace_failure_ns;
  } else if (job->stage == EVEN_JOB_RUNS || (job->stage == EVEN_JOB_SETTLES && !secondary)) {
    move_to(job, EVEN_JOB_TERMINATED, SIGTERM, false, grace_failure_ns);
  }
  if (first) {
    even_job_flights_tell(job);
  }
}

void even_job_act_on_end(even_job *job, even_job_rank *rank) {
  if (job->follower != NULL) { /* what follows from it, the leader says */
    if (even_job_is_outside(job, (size_t)(rank - job->ranks))) {
      (void)even_process_signal_group(rank->pid, SIGKILL); /* workers that it has left */
    }
    even_job_follower_tell_end(job, rank);
    return;
  }
  if (even_job_outside_ended(job, (size_t)(rank - job->ranks))) {
    return;
  }
  if (rank->end.signal == 0 && rank->end.code == 0) {
    even_job_left_well(job);
    if (job->stage == EVEN_JOB_SETTLES) {
      move_to(job, EVEN_JOB_TERMINATED, SIGTERM, false, grace_failure_ns);
    }
  } else if (!even_job_goes_on_without(job, (size_t)(rank - job->ranks))) {
    even_job_rank_failed(job, (size_t)(rank - job->ranks));
  }
}

void even_job_rank_ended(even_job *job, even_job_rank *rank, const even_process_end *end) {
  keep_end(job, rank, end);
  even_job_act_on_end(job, rank);
}

void even_job_host_ended(even_job *job, size_t host, const char *why) {
  size_t before = job->ended;
  for (size_t i = 0; i < job->count; i++) {
    even_job_rank *rank = &job->ranks[i];
    if (rank->alive && even_job_host_number(job, i) == host) {
      const even_process_end end = {.pid = rank->pid, .code = 1};
      rank->lost = why;
      rank->stopped_by_agent = false;
      keep_end(job, rank, &end);
    }
  }
  for (size_t i = before, ended = job->ended; i < ended; i++) {
    even_job_act_on_end(job, &job->ranks[job->order[i]]);
  }
}

/* What those that live wait for until all have come, of which the rank never was a part. */
static even_fault_leave awaited(const even_job *job, size_t gone) {
  const even_rank_progress *its = &job->progress.ranks[gone];
  even_fault_leave found = EVEN_LEAVE_NONE;
  for (size_t i = 0; i < job->count && !even_job_lost(job, gone); i++) {
    const even_rank_progress *other = &job->progress.ranks[i];
    if (job->ranks[i].alive && other->joining && !other->joined && !its->joined) {
      return EVEN_LEAVE_BEFORE_JOINING;
    }
    if (job->ranks[i].alive && other->opening > other->opened && its->opened < other->opening) {
      found = EVEN_LEAVE_BEFORE_OPENING;
    }
  }
  return found;
}

void even_job_check_awaited(even_job *job) {
  if (job->stage != EVEN_JOB_RUNS || job->ended == 0 || job->alive == 0 || job->follower != NULL) {
    return;
  }
  even_progress_read(&job->progress);
  bool missed = false;
  for (size_t i = 0; i < job->ended; i++) {
    even_job_rank *gone = &job->ranks[job->order[i]];
    gone->awaited = awaited(job, job->order[i]);
    missed = missed || gone->awaited != EVEN_LEAVE_NONE;
  }
  if (missed) {
    move_to(job, EVEN_JOB_TERMINATED, SIGTERM, false, grace_failure_ns);
  }
}

void even_job_rank_stopped(even_job *job, even_job_rank *rank, int signal) {
  char by[48];
  even_job_rank_stands(job, rank);
  if (even_job_guardian_holds(job)) {
    return;
  }
  (void)snprintf(by, sizeof by, " by %s", even_signal_name(signal));
  if (job->follower != NULL) {
    rank->was_stopped = true;
    rank->stopped_by = signal;
    even_job_follower_tell_stopped(job, rank, signal);
  } else {
    tell_stopped(job, rank, by);
  }
}

void even_job_end_hung(even_job *job) {
  if (job->stage == EVEN_JOB_RUNS && !even_job_ends_hung_alone(job)) {
    even_job_flights_take(job);
    move_to(job, EVEN_JOB_TERMINATED, SIGTERM, false, grace_failure_ns);
    even_job_flights_tell(job);
  }
}
