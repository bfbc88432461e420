/* One attempt of a job: from the start of its ranks to the end of the last. */
#include "base/fail.h"
#include "orchestrator/adopt.h"
#include "orchestrator/announcer.h"
#include "orchestrator/boards.h"
#include "orchestrator/elastic.h"
#include "orchestrator/follower.h"
#include "orchestrator/gifts.h"
#include "orchestrator/hangs.h"
#include "orchestrator/job.h"
#include "orchestrator/job_attempt.h"
#include "orchestrator/legacy.h"
#include "orchestrator/openings.h"
#include "orchestrator/outlast.h"
#include "orchestrator/remote.h"
#include "orchestrator/returns.h"
#include "orchestrator/standing.h"
#include "orchestrator/stragglers.h"
#include "orchestrator/succession.h"
#include "orchestrator/usages.h"
#include "orchestrator/waiting.h"
#include "orchestrator/warm.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/path.h"
#include "os/port.h"

#include <stdio.h>
#include <string.h>

static const uint64_t tick_ns = 100000000u;
static const uint64_t writes_ns = 10000000000u;
static const uint64_t abandon_ns = 10000000000u;
enum { joining_ms = 5 }; /* between two looks whether all stand, where somebody can join */

static even_job_rank *rank_of(even_job *job, pid_t pid) {
  for (size_t i = 0; i < job->count; i++) {
    if (job->ranks[i].alive && !job->ranks[i].elsewhere && job->ranks[i].pid == pid) {
      return &job->ranks[i];
    }
  }
  return NULL;
}

void even_job_take_end(even_job *job, const even_process_end *end) {
  even_job_rank *rank = rank_of(job, end->pid);
  if (rank == NULL && even_announcer_took_end(job->announcer, end)) {
    return;
  }
  if (rank == NULL) {
    if (end->stopped || end->continued || !even_job_hosts_reaped(job, end->pid)) {
      /* the guardian, or an orphan of a rank, adopted: reaped, and that is all */
      even_job_guard_ended(job, end);
    }
  } else if (end->continued) {
    even_job_rank_continues(job, rank);
  } else if (!end->stopped) {
    even_job_rank_ended(job, rank, end);
  } else if (job->stage == EVEN_JOB_RUNS) {
    even_job_rank_stopped(job, rank, end->signal);
  }
}

void even_job_reap(even_job *job) {
  even_process_end end;
  bool any = true;
  while (any) {
    even_status status = even_process_reap(&end, &any);
    if (status != EVEN_OK) {
      job->failure = job->failure.status == EVEN_OK ? *even_error_last() : job->failure;
      return;
    }
    if (any) {
      even_job_take_end(job, &end);
    }
  }
}

/* Notice that nobody can be told now, while ranks start or are ended: of the next attempt's it is asked. */
static bool keeps_notice(even_job *job, int number) {
  bool runs = job->stage == EVEN_JOB_RUNS && job->alive > 0;
  bool kept =
      number == SIGUSR1 && job->params->notice_seconds > 0 && job->follower == NULL && job->draining == 0 && !runs;
  if (kept && job->own_notice.signal == 0) {
    job->own_notice = (even_host_notice){.signal = number, .at_ns = even_clock_ns()};
  }
  return kept;
}

void even_job_signals_ready(void *context, int fd) {
  even_job *job = context;
  int number = 0;
  (void)fd;
  while ((number = even_signals_next(&job->signals)) != 0) {
    if (even_job_drain(job, &(even_notice){.signal = number, .what = ""}, "")) {
      continue;
    }
    switch (number) {
      case SIGCHLD:
        even_job_reap(job);
        break;
      case SIGINT:
      case SIGTERM:
      case SIGHUP:
        if (job->follower != NULL) {
          even_job_follower_signalled(job, number);
        } else {
          even_job_end_by_user(job, number);
        }
        break;
      default:
        if (!keeps_notice(job, number)) {
          even_job_signal_ranks(job, number, false);
          even_job_hosts_signal(job, number, false, false);
        }
        break;
    }
  }
}

static void check_hangs(even_job *job) {
  bool end = false;
  if (job->stage != EVEN_JOB_RUNS || even_gifts_hold_up(job) || /* may wait for long */
      !even_succession_acts(job)) {                             /* they are held */
    return;
  }
  even_hangs_tick(job->hangs, job, &end);
  if (end && job->follower != NULL) {
    even_job_follower_tell_hung(job);
  } else if (end) {
    even_job_end_hung(job);
  }
}

static void check(even_job *job) {
  const even_agent_observer *observer = &job->params->observer;
  if (observer->check != NULL && job->failure.status == EVEN_OK && observer->check(observer->context) != EVEN_OK) {
    job->failure = *even_error_last();
  }
}

/* Whoever leads next knows it, too. */
static void note_shares(even_job *job) {
  job->shares = true;
  if (job->hosts != NULL && job->follower == NULL && even_succession_bequeath(job) != EVEN_OK) {
    even_error_clear(); /* the next attempt's estate says it */
  }
}

void even_job_note_progress(even_job *job) {
  even_progress_read(&job->progress);
  if (!job->shares && even_progress_shares(&job->progress)) {
    note_shares(job);
  }
  if (job->params->legacy != NULL) { /* for the process that starts another agent when this one is killed */
    even_legacy_progress(job->params->legacy, &job->progress);
  }
}

static void tick(even_job *job) {
  uint64_t now = even_clock_ns();
  if (now >= job->next_tick_ns) {
    job->next_tick_ns = now + tick_ns;
    check(job);
    if (job->params->observer.tick != NULL) {
      job->params->observer.tick(job->params->observer.context);
    }
    even_job_hosts_tick(job);
    even_elastic_tick(job);
    even_job_drain_tick(job);
    even_job_note_progress(job);
    even_job_guard_tick(job);
    even_job_check_awaited(job);
    if (even_succession_acts(job)) {
      even_job_stands_at_start(job);
      even_job_openings_tick(job);
    }
    check_hangs(job);
    even_stragglers_tick(job->stragglers, job);
    even_usages_tick(job->usages, job);
  }
}

static even_status turn(even_job *job) {
  uint64_t now = even_clock_ns();
  int wait_ms = now >= job->next_tick_ns ? 0 : (int)((job->next_tick_ns - now + 999999u) / 1000000u);
  bool written = job->unwritten != NULL && job->alive == 0; /* and that is all that is waited for */
  bool looks = job->awaits_joiner || job->lost_ns != 0 || job->undecided_ns != 0 || written;
  int look_ms = looks ? joining_ms : even_boards_look_ms(job);
  int stand_ms = even_job_standing_look_ms(job);
  wait_ms = look_ms > 0 && wait_ms > look_ms ? look_ms : wait_ms;
  wait_ms = stand_ms > 0 && wait_ms > stand_ms ? stand_ms : wait_ms;
  EVEN_TRY(even_loop_turn(&job->loop, wait_ms));
  even_job_snapshots_turn(job);
  even_job_check_deadline(job);
  if (even_job_drain_late(job)) {
    even_job_end_by_user(job, SIGTERM);
  }
  tick(job);
  even_job_shrink_tick(job);
  even_job_replace_tick(job);
  even_boards_turn(job);
  even_job_standing_turn(job);
  return EVEN_OK;
}

/* EVEN_OK also where what has failed is not the loop: job->failure. */
static even_status turn_watched(even_job *job) {
  even_succession_turns(job, true);
  even_status status = turn(job);
  even_succession_turns(job, false); /* of another voter, where that has come in this turn */
  return status;
}

even_status even_job_turn(even_job *job) {
  EVEN_TRY(turn_watched(job));
  return job->failure.status == EVEN_OK ? EVEN_OK : even_error_restore(&job->failure);
}

void even_job_begin_watch(even_job *job) {
  for (size_t i = 0; i < job->count; i++) {
    even_job_reset_rank(job, i);
  }
  job->ended = 0;
  job->alive = 0;
  job->stage = EVEN_JOB_RUNS;
  job->flights_told = false;
  job->smaller = false;
  even_job_flights_forget(job);
  even_oom_watch_close(&job->oom);
  even_oom_watch_open(&job->oom);
  even_progress_begin(&job->progress);
  even_job_openings_begin(job);
  even_job_waiting_begin(job);
  even_hangs_begin(job->hangs);
  even_stragglers_begin(job->stragglers);
  job->awaits_joiner = job->too_few_told = false;
  even_job_drain_forget(job);
  even_job_standing_begin(job);
}

/* The agent itself failed: nothing may stay behind. What another one leads is that one's. All are killed before any is
 * waited for, and none is for ever: no signal ends one that waits in the kernel. */
static void abandon(even_job *job) {
  if (!even_succession_is_superseded(job->hosts)) {
    even_job_hosts_signal(job, SIGKILL, true, true);
  }
  even_job_signal_ranks(job, SIGKILL, true);
  const uint64_t killed_ns = even_clock_ns();
  for (size_t i = 0; i < job->count; i++) {
    const uint64_t since_ns = even_clock_ns() - killed_ns;
    if (job->ranks[i].alive && !job->ranks[i].elsewhere &&
        !even_process_wait_within(job->ranks[i].pid, since_ns < abandon_ns ? abandon_ns - since_ns : 0)) {
      even_job_tell_unending(job, i, even_clock_ns() - killed_ns, "evenstep ends without it");
    }
    job->ranks[i].alive = false;
  }
  job->alive = 0;
  job->stage = EVEN_JOB_KILLED; /* what comes of other hosts' ranks starts, and decides, nothing any more */
}

/* Other hosts clear up their part, too, before the next attempt begins. */
static even_status await_hosts(even_job *job) {
  uint64_t since_ns = even_clock_ns();
  even_status status = EVEN_OK;
  while (status == EVEN_OK && !even_job_hosts_settled(job, since_ns)) {
    status = even_job_turn(job);
  }
  return status;
}

even_status even_job_begin_attempt(even_job *job) {
  even_job_begin_watch(job);
  EVEN_TRY(even_job_generations_begin(job));
  if (job->follower == NULL && !even_elastic_port(job)) {
    EVEN_TRY(even_port_hold(&job->master_port, &job->port_held));
  }
  even_outlast_chosen(job);
  even_status status = even_job_hosts_begin(job); /* first: what they do until their ranks run takes its time, too */
  for (size_t i = 0; status == EVEN_OK && !job->late && i < job->count; i++) {
    status = even_job_is_here(job, i) ? even_job_start_rank(job, i) : EVEN_OK;
  }
  if (job->warm != NULL) { /* those that nobody took */
    even_warm_close(*job->warm);
    *job->warm = NULL;
  }
  return status;
}

bool even_job_attempt_lives(const even_job *job) {
  return job->alive > 0 || even_job_replace_waits(job);
}

/* All that they have taken is on the disk before anybody looks for the newest checkpoint. Who ends the job now, or once
 * more, waits for none. The loop turns meanwhile, also where it is the attempt itself that has failed, with `status`:
 * hosts that hear nothing of this one for long give it up. */
static even_status await_written(even_job *job, even_status status) {
  even_error why = *even_error_last();
  const int end_signals = job->end_signals;
  uint64_t told_ns = 0;
  even_status turned = EVEN_OK;
  even_job_snapshots_finish(job);
  while (turned == EVEN_OK && job->unwritten != NULL) {
    if (job->follower != NULL && even_clock_ns() - told_ns > writes_ns) { /* who leads waits for no other reason */
      told_ns = even_clock_ns();
      even_job_follower_tell_writes(job);
    }
    turned = turn_watched(job);
    if (status == EVEN_OK && (turned != EVEN_OK || job->failure.status != EVEN_OK)) {
      why = turned != EVEN_OK ? *even_error_last() : job->failure;
      status = why.status;
    }
    if (job->end_signals != end_signals) {
      even_job_snapshots_give_up(job);
    }
  }
  even_job_snapshots_wait(job);
  return status == EVEN_OK ? EVEN_OK : even_error_restore(&why);
}

even_status even_job_finish_attempt(even_job *job, even_status status) {
  if (job->alive > 0) {
    abandon(job);
  } else if (job->places != NULL) {
    even_job_hosts_signal(job, SIGKILL, true, true); /* who waits there to fill a place waits no more */
  }
  even_returns_end(job);
  even_job_sweep(job);
  status = await_written(job, status);
  return status == EVEN_OK ? await_hosts(job) : status;
}

even_status even_job_run_attempt(even_job *job) {
  even_status status = !job->adopted          ? even_job_begin_attempt(job)
                       : job->outlast != NULL ? even_outlast_adopt(job)
                                              : even_adopt_ranks(job);
  even_succession_turns(job, false); /* it began with even_job_open, where ranks run */
  while (status == EVEN_OK && even_job_attempt_lives(job)) {
    even_outlast_settle(job);
    status = even_job_turn(job);
  }
  return even_job_finish_attempt(job, status);
}

/* Chosen by the killer itself, or a worker process of it was (torch's words for that are in its traceback). */
static bool met_oom_killer(const even_job *job, const even_job_rank *rank) {
  static const char worker[] = "is killed by signal: Killed";
  const even_text *error = &rank->output.streams[1].tail;
  bool struck = job->oom.counted || job->oom.victim_count > 0;
  if (even_oom_is_victim(&job->oom, rank->pid)) {
    return true;
  }
  if (rank->end.signal != 0) {
    return rank->end.signal == SIGKILL && !rank->stopped_by_agent && job->oom.counted;
  }
  return struck && rank->end.code != 0 && error->data != NULL &&
         memmem(error->data, error->length, worker, sizeof worker - 1) != NULL;
}

even_fault_facts even_job_facts(const even_job *job, size_t index) {
  const even_job_rank *rank = &job->ranks[index];
  const even_text *output = &rank->output.streams[0].tail;
  const even_text *error = &rank->output.streams[1].tail;
  return (even_fault_facts){.rank = (int)index,
                            .device = job->params->devices->items[index].name,
                            .host = even_job_host_name(job, index),
                            .pid = (long)rank->pid,
                            .stopped_by_agent = rank->stopped_by_agent,
                            .stood_still = rank->stood_still,
                            .lost = rank->lost,
                            .hung = !rank->hung       ? NULL
                                    : rank->elsewhere ? rank->hung_words
                                                      : even_hangs_words(job->hangs, index),
                            .slow = rank->slow ? rank->slow_words : NULL,
                            .out_of_memory = rank->elsewhere ? rank->out_of_memory : met_oom_killer(job, rank),
                            .leave = rank->awaited,
                            .steps_known = job->progress.reader != NULL && job->progress.ranks[index].joined,
                            .steps = job->progress.ranks[index].stepped ? job->progress.ranks[index].last_step + 1 : 0,
                            .samples = job->progress.reader != NULL ? job->progress.ranks[index].samples : 0,
                            .batch = job->progress.reader != NULL ? job->progress.ranks[index].batch : 0,
                            .signal = rank->end.signal,
                            .code = rank->end.code,
                            .peak_memory_bytes = rank->end.peak_memory_bytes,
                            .error = error->data,
                            .error_length = error->length,
                            .output = output->data,
                            .output_length = output->length};
}

void even_job_forget_attempt(even_job *job) {
  even_port_let_go(&job->port_held);
  for (size_t i = 0; job->ranks != NULL && i < job->count; i++) {
    if (job->ranks[i].output_open) {
      even_rank_output_close(&job->ranks[i].output);
      job->ranks[i].output_open = false;
    }
  }
}

even_status even_job_make_folders(even_job *job) {
  even_text logs = EVEN_TEXT_EMPTY;
  EVEN_TRY(even_path_absolute(job->params->run_folder, &job->run_folder));
  even_text_format(&logs, "%s/logs", job->run_folder.data);
  even_status status = even_text_status(&logs);
  if (status == EVEN_OK) {
    status = even_folder_make(logs.data);
  }
  even_text_free(&logs);
  return status;
}
