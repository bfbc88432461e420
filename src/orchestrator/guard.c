/* What must go with the job whatever ends the agent: the guardian is told of all of it, and replaced where it is
 * killed; what the ranks of an attempt leave running is swept away. */
#include "base/alloc.h"
#include "base/fail.h"
#include "orchestrator/announcer.h"
#include "orchestrator/environment.h"
#include "orchestrator/legacy.h"
#include "orchestrator/outlast.h"
#include "orchestrator/remote.h"
#include "orchestrator/succession.h"
#include "orchestrator/warm.h"
#include "os/clock.h"
#include "os/sweep.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>

enum { SWEEP_MS = 5000 };
static const uint64_t AGAIN_NS = 10000000000u;

/* What of its ranks' places marks them. */
static even_rank_place place_of(const even_job *job) {
  return (even_rank_place){.job = job->id,
                           .group = job->group,
                           .groups = job->groups,
                           .era = job->era,
                           .keeper = even_legacy_keeper(job->params->legacy)};
}

static void write_mark(const even_job *job, char mark[EVEN_SWEEP_MARK]) {
  const even_rank_place place = place_of(job);
  even_environment_mark(&place, mark);
}

static even_status start_guardian(even_job *job) {
  char mark[EVEN_SWEEP_MARK];
  write_mark(job, mark);
  return even_guardian_start(mark, &job->guardian);
}

/* Other hosts slow their own ranks. */
static even_status slow_own(even_job *job) {
  double *quota = NULL;
  if (job->params->cpu_quota != NULL) {
    EVEN_TRY(EVEN_NEW_ARRAY(&quota, job->count));
    for (size_t i = 0; i < job->count; i++) {
      bool own = even_job_is_here(job, i);
      quota[i] = own ? job->params->cpu_quota[i] : (double)NAN;
    }
  }
  even_status status =
      even_slowdown_open(job->params->devices, quota, !job->params->unpinned, job->id, &job->guardian, &job->slow);
  even_free(quota);
  return status;
}

even_status even_job_guard_open(even_job *job) {
  if (job->outlast != NULL && job->adopted) {
    EVEN_TRY(even_outlast_guardian(job));
  } else {
    EVEN_TRY(start_guardian(job));
  }
  EVEN_TRY(slow_own(job));
  if (job->slow.refused[0] != '\0') {
    even_job_notice(
        job,
        "no CPU quota is permitted here (%s): busy neighbours on the same CPUs slow the ranks instead, about "
        "as much",
        job->slow.refused);
  }
  return EVEN_OK;
}

/* A new guardian knows of nothing yet. */
static even_status tell_all(even_job *job) {
  for (size_t i = 0; i < job->count; i++) {
    if (job->ranks[i].alive && !job->ranks[i].elsewhere) {
      EVEN_TRY(even_guardian_add_session(&job->guardian, job->ranks[i].pid));
    }
  }
  job->guarded_command = even_outlast_holds(job) ? 0 : even_announcer_session(job->announcer);
  if (job->guarded_command > 0) {
    EVEN_TRY(even_guardian_add_session(&job->guardian, job->guarded_command));
  }
  return even_slowdown_tell(&job->slow);
}

void even_job_guard_close(even_job *job) {
  even_guardian_stop(&job->guardian);
  if (job->unguarded) {
    even_guardian_stop(&job->unreplaced);
    job->unguarded = false;
  }
}

bool even_job_guardian_holds(const even_job *job) {
  uint64_t held = 0;
  return even_guardian_holds(&job->guardian, &held);
}

/* EVEN_OK: there is one, and it knows all; else job->guardian says whether there is. */
static even_status start_next(even_job *job) {
  even_succession_guard(job, false); /* the voter's thread writes to it: the next check gives the new one */
  EVEN_TRY(start_guardian(job));
  even_status status = tell_all(job);
  if (job->unguarded) {
    if (status == EVEN_OK) {
      status = even_guardian_inherit(&job->guardian, &job->unreplaced);
    }
    even_guardian_stop(&job->unreplaced);
    job->unguarded = false;
  }
  return status;
}

/* The guardian has ended, which it never does by itself while the agent lives. The training does not end with it; and
 * ranks that it held are held by the next one, which lets them go in its turn. */
static void replace(even_job *job) {
  const even_error kept = *even_error_last();
  even_guardian gone = job->guardian;
  long lost = (long)gone.pid;
  job->unreplaced = (even_guardian){.pid = -1, .pipe = -1, .page_fd = gone.page_fd, .page = gone.page};
  job->unguarded = true;
  gone.page = NULL;
  gone.page_fd = -1;
  even_status status = start_next(job);
  even_guardian_stop(&gone);
  even_outlast_guarded(job);
  if (status == EVEN_OK) {
    even_job_notice(job, "the job's guardian (process %ld) has ended, killed perhaps: another one watches now", lost);
  } else {
    even_job_notice(job,
                    "the job's guardian (process %ld) has ended and there is no other (%s): where evenstep is killed "
                    "too, processes of the job may stay",
                    lost, even_error_last()->what);
  }
  (void)even_error_restore(&kept);
}

/* It was told that there is none. */
void even_job_guard_again(even_job *job) {
  const even_error kept = *even_error_last();
  if (job->guardian.pid >= 0) {
    return;
  }
  even_status status = start_next(job);
  if (job->guardian.pid >= 0) {
    even_outlast_guarded(job);
    even_job_notice(
        job, "the job has a guardian again (process %ld)%s%s", (long)job->guardian.pid,
        status == EVEN_OK ? "" : ", which was not told of all: ", status == EVEN_OK ? "" : even_error_last()->what);
  }
  (void)even_error_restore(&kept);
}

void even_job_guard_tick(even_job *job) {
  if (job->guardian.pid >= 0) {
    job->unguarded_ns = 0;
    return;
  }
  uint64_t now = even_clock_ns();
  if (job->unguarded_ns == 0 || now - job->unguarded_ns > AGAIN_NS) {
    job->unguarded_ns = now;
    even_job_guard_again(job);
  }
}

even_status even_job_guard_rank(even_job *job, pid_t pid) {
  const even_error kept = *even_error_last();
  even_job_guard_again(job);
  even_status status = even_guardian_add_session(&job->guardian, pid);
  if (status == EVEN_OK || even_error_last()->system_error != EPIPE) {
    return status;
  }
  (void)even_error_restore(&kept);
  replace(job);
  return EVEN_OK;
}

static void forget(even_job *job, const pid_t *sessions, size_t count) {
  const even_error kept = *even_error_last();
  for (size_t i = 0; i < count; i++) {
    if (sessions[i] > 0) {
      (void)!even_guardian_drop_session(&job->guardian, sessions[i]); /* one that is gone has nothing to forget */
    }
  }
  (void)even_error_restore(&kept);
}

/* Whether it knows of no command that is no more. */
static bool forget_command(even_job *job) {
  if (job->guarded_command > 0 && even_guardian_has_room(&job->guardian)) {
    forget(job, &job->guarded_command, 1);
    job->guarded_command = 0;
  }
  return job->guarded_command == 0;
}

void even_job_guard_command(even_job *job, pid_t session, bool begins) {
  const even_error kept = *even_error_last();
  if (!begins) {
    (void)forget_command(job);
  } else if (forget_command(job) && even_guardian_has_room(&job->guardian)) {
    job->guarded_command = session;
    (void)!even_job_guard_rank(job, session); /* else the mark finds none of its children */
  }
  (void)even_error_restore(&kept);
}

void even_job_guard_ended(even_job *job, const even_process_end *end) {
  size_t rank = 0;
  bool its_own = job->warm != NULL && !end->stopped && !end->continued && even_warm_reaped(*job->warm, end->pid);
  if (end->stopped || end->continued || its_own) {
    return;
  }
  if (end->pid == job->guardian.pid) {
    replace(job);
  } else if (even_slowdown_forget(&job->slow, end->pid, &rank)) {
    forget(job, &end->pid, 1);
    even_job_notice(job,
                    "a busy neighbour of rank %zu (process %ld) has ended, killed perhaps: the rank is faster now than "
                    "its --cpu-quota",
                    rank, (long)end->pid);
  }
}

void even_job_sweep_another(const even_job *job) {
  const even_rank_place place = place_of(job);
  even_sweep sweep = {.begins = true};
  even_environment_mark_of_any(&place, sweep.mark);
  (void)even_sweep_kill(&sweep, SWEEP_MS); /* what is left its own agent will end */
}

void even_job_sweep(even_job *job) {
  const even_error kept = *even_error_last(); /* of what ended the attempt, not of its cleaning up */
  even_sweep sweep = {.session_count = 0};
  pid_t *sessions = NULL;
  write_mark(job, sweep.mark);
  if (EVEN_NEW_ARRAY(&sessions, job->count) != EVEN_OK) {
    sessions = NULL; /* the mark alone finds nearly all, and the guardian comes after us */
  }
  sweep.session_count = 0;
  for (size_t i = 0; sessions != NULL && i < job->count; i++) {
    if (!job->ranks[i].elsewhere) {
      sessions[sweep.session_count++] = job->ranks[i].pid;
    }
  }
  sweep.sessions = sessions;
  if (even_sweep_kill(&sweep, SWEEP_MS) > 0) {
    even_job_notice(job, "processes of this job could not be ended; they carry %s in their environment", sweep.mark);
  }
  even_process_end end; /* orphans that were ours to reap */
  bool any = true;
  while (any && even_process_reap(&end, &any) == EVEN_OK) {
    if (any && !even_announcer_took_end(job->announcer, &end)) {
      even_job_guard_ended(job, &end);
    }
  }
  forget(job, sessions, sweep.session_count);
  even_free(sessions);
  (void)even_error_restore(&kept);
}
