/* One attempt of a job: from the start of its ranks to the end of the last. */
#include "base/alloc.h"
#include "base/fail.h"
#include "orchestrator/boards.h"
#include "orchestrator/elastic.h"
#include "orchestrator/environment.h"
#include "orchestrator/follower.h"
#include "orchestrator/hangs.h"
#include "orchestrator/job.h"
#include "orchestrator/remote.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/pipe.h"
#include "os/port.h"
#include "os/process_stat.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

/* How long ranks may take to end when asked, and again when told. */
static const uint64_t grace_interrupt_ns = 10000000000u;
static const uint64_t grace_failure_ns = 5000000000u;
static const uint64_t tick_ns = 100000000u;
enum { joining_ms = 5 }; /* between two looks whether all stand, where somebody can join */

void even_job_signal_ranks(even_job *job, int number, bool groups) {
  for (size_t i = 0; i < job->count; i++) {
    if (job->ranks[i].alive && !job->ranks[i].elsewhere) {
      (void)(groups ? even_process_signal_group(job->ranks[i].pid, number)
                    : even_process_signal(job->ranks[i].pid, number));
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
    if (rank->elsewhere) {
      rank->stood_still = rank->alive && rank->was_stopped;
    } else {
      rank->stood_still = rank->alive && even_process_stat_read(rank->pid, &facts) == 0 && facts.state == 'T';
    }
    if (rank->stood_still && !rank->was_stopped) {
      tell_stopped(job, rank, "");
    }
    any = any || rank->stood_still;
  }
  return any;
}

static void move_to(even_job *job, even_job_stage stage, int number, bool groups, uint64_t grace_ns) {
  for (size_t i = 0; i < job->count; i++) {
    job->ranks[i].stopped_by_agent = job->ranks[i].stopped_by_agent || job->ranks[i].alive;
  }
  job->stage = stage;
  job->deadline_ns = even_clock_ns() + grace_ns;
  even_job_generations_refuse(job);
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

/* The ending goes on to the next stage when its time is over. */
static void check_deadline(even_job *job) {
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

static void end_by_user(even_job *job, int number) {
  bool again = number == SIGINT && ++job->interrupts > 1; /* whatever signal came before */
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

static even_job_rank *rank_of(even_job *job, pid_t pid) {
  for (size_t i = 0; i < job->count; i++) {
    if (job->ranks[i].alive && !job->ranks[i].elsewhere && job->ranks[i].pid == pid) {
      return &job->ranks[i];
    }
  }
  return NULL;
}

static void keep_end(even_job *job, even_job_rank *rank, const even_process_end *end) {
  rank->alive = false;
  rank->end = *end;
  even_job_drain_ended(job, rank);
  job->order[job->ended++] = (size_t)(rank - job->ranks);
  job->alive--;
  even_rank_output_finish(&rank->output);
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

/* What follows from a rank's end. */
static void act_on_end(even_job *job, even_job_rank *rank) {
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
  act_on_end(job, rank);
}

void even_job_host_ended(even_job *job, size_t first, size_t count, const char *why) {
  size_t before = job->ended;
  for (size_t i = first; i < first + count; i++) {
    even_job_rank *rank = &job->ranks[i];
    if (rank->alive) {
      const even_process_end end = {.pid = rank->pid, .code = 1};
      rank->lost = why;
      rank->stopped_by_agent = false;
      keep_end(job, rank, &end);
    }
  }
  for (size_t i = before, ended = job->ended; i < ended; i++) {
    act_on_end(job, &job->ranks[job->order[i]]);
  }
}

/* es.prepare waits for all ranks, and one that has ended cannot come any more: no matter how slow they are, ranks that
 * wait there would do so for ever. Scripts in which nobody waits are let be. */
static void check_awaited(even_job *job) {
  bool waits = false;
  if (job->stage != EVEN_JOB_RUNS || job->ended == 0 || job->alive == 0 || job->follower != NULL) {
    return;
  }
  even_progress_read(&job->progress);
  for (size_t i = 0; i < job->count; i++) {
    const even_rank_progress *rank = &job->progress.ranks[i];
    waits = waits || (job->ranks[i].alive && rank->joining && !rank->joined);
  }
  bool missed = false;
  for (size_t i = 0; i < job->ended && waits; i++) {
    size_t gone = job->order[i];
    job->ranks[gone].awaited = !job->progress.ranks[gone].joined;
    missed = missed || job->ranks[gone].awaited;
  }
  if (missed) {
    move_to(job, EVEN_JOB_TERMINATED, SIGTERM, false, grace_failure_ns);
  }
}

void even_job_rank_stopped(even_job *job, even_job_rank *rank, int signal) {
  char by[48];
  (void)snprintf(by, sizeof by, " by %s", even_signal_name(signal));
  if (job->follower != NULL) {
    rank->was_stopped = true;
    even_job_follower_tell_stopped(job, rank, signal);
  } else {
    tell_stopped(job, rank, by);
  }
}

static void reap(even_job *job) {
  even_process_end end;
  bool any = true;
  while (any) {
    even_status status = even_process_reap(&end, &any);
    if (status != EVEN_OK) {
      job->failure = job->failure.status == EVEN_OK ? *even_error_last() : job->failure;
      return;
    }
    even_job_rank *rank = any ? rank_of(job, end.pid) : NULL;
    if (rank == NULL) {
      if (any && (end.stopped || !even_job_hosts_reaped(job, end.pid))) {
        /* the guardian, or an orphan of a rank, adopted: reaped, and that is all */
        even_job_guard_ended(job, &end);
      }
      continue;
    }
    if (!end.stopped) {
      even_job_rank_ended(job, rank, &end);
    } else if (job->stage == EVEN_JOB_RUNS) {
      even_job_rank_stopped(job, rank, end.signal);
    }
  }
}

void even_job_signals_ready(void *context, int fd) {
  even_job *job = context;
  int number = 0;
  (void)fd;
  while ((number = even_signals_next(&job->signals)) != 0) {
    if (even_job_drain(job, number, "")) {
      continue;
    }
    switch (number) {
      case SIGCHLD:
        reap(job);
        break;
      case SIGINT:
      case SIGTERM:
      case SIGHUP:
        if (job->follower != NULL) {
          even_job_follower_signalled(job, number);
        } else {
          end_by_user(job, number);
        }
        break;
      default:
        even_job_signal_ranks(job, number, false);
        even_job_hosts_signal(job, number, false, false);
        break;
    }
  }
}

void even_job_end_hung(even_job *job) {
  if (job->stage == EVEN_JOB_RUNS) {
    even_job_flights_take(job);
    move_to(job, EVEN_JOB_TERMINATED, SIGTERM, false, grace_failure_ns);
    even_job_flights_tell(job);
  }
}

static void check_hangs(even_job *job) {
  bool end = false;
  if (job->stage != EVEN_JOB_RUNS || even_job_any_stands(job)) { /* who stands may wait for long */
    return;
  }
  even_hangs_tick(job->hangs, job, &end);
  if (end && job->follower != NULL) {
    even_job_follower_tell_hung(job);
  } else if (end) {
    even_job_end_hung(job);
  }
}

static void tick(even_job *job) {
  uint64_t now = even_clock_ns();
  if (now >= job->next_tick_ns) {
    job->next_tick_ns = now + tick_ns;
    if (job->params->observer.tick != NULL) {
      job->params->observer.tick(job->params->observer.context);
    }
    even_job_hosts_tick(job);
    even_elastic_tick(job);
    check_awaited(job);
    check_hangs(job);
  }
}

static even_status turn(even_job *job) {
  uint64_t now = even_clock_ns();
  int wait_ms = now >= job->next_tick_ns ? 0 : (int)((job->next_tick_ns - now + 999999u) / 1000000u);
  int look_ms = job->awaits_joiner ? joining_ms : even_boards_look_ms(job);
  wait_ms = look_ms > 0 && wait_ms > look_ms ? look_ms : wait_ms;
  EVEN_TRY(even_loop_turn(&job->loop, wait_ms));
  check_deadline(job);
  if (even_job_drain_late(job)) {
    end_by_user(job, SIGTERM);
  }
  tick(job);
  even_job_shrink_tick(job);
  even_job_replace_tick(job);
  even_boards_turn(job);
  return job->failure.status == EVEN_OK ? EVEN_OK : even_error_restore(&job->failure);
}

static void write_header(const even_job *job, int log, size_t rank, char *const *arguments) {
  even_text text = EVEN_TEXT_EMPTY;
  char when[32];
  time_t now = (time_t)(even_clock_wall_ns() / 1000000000u);
  struct tm parts;
  (void)gmtime_r(&now, &parts);
  (void)strftime(when, sizeof when, "%Y-%m-%d %H:%M:%S", &parts);
  even_text_format(&text, "==== attempt %d, %s UTC, rank %zu of %zu on %s:", job->attempt, when, rank, job->count,
                   job->params->devices->items[rank].name);
  for (size_t i = 0; arguments[i] != NULL; i++) {
    even_text_add(&text, " ");
    even_text_add_shown(&text, arguments[i]);
  }
  even_text_add(&text, "\n");
  if (even_text_status(&text) != EVEN_OK || even_file_write_all(log, text.data, text.length) != EVEN_OK) {
    even_error_clear(); /* a full disk shows at the first output, and does not stop the training */
  }
  even_text_free(&text);
}

static even_status open_log(even_job *job, size_t rank, int *log) {
  even_text path = EVEN_TEXT_EMPTY;
  even_text_format(&path, "%s/logs/rank-%zu.log", job->run_folder.data, rank);
  even_status status = even_text_status(&path);
  if (status == EVEN_OK) {
    status = even_log_open(path.data, log);
  }
  even_text_free(&path);
  if (status == EVEN_OK) {
    write_header(job, *log, rank, job->params->command);
  }
  return status;
}

static void give_line(void *context, int rank, bool error, const char *text, size_t length) {
  const even_agent_observer *observer = &((even_job *)context)->params->observer;
  even_hangs_output(((even_job *)context)->hangs, rank);
  if (observer->line != NULL) {
    observer->line(observer->context, rank, error, text, length);
  }
}

static even_status start_process(even_job *job, size_t index, const even_environment *environment,
                                 even_process *process) {
  const even_device *device = &job->params->devices->items[index];
  char *const join[] = {(char *)even_slowdown_join(&job->slow, index), NULL};
  int inherit[3];
  size_t inherit_count = 0;
  if (job->params->telemetry_fd >= 0) {
    inherit[inherit_count++] = job->params->telemetry_fd;
  }
  if (job->snapshots[index] >= 0) {
    inherit[inherit_count++] = job->snapshots[index];
  }
  if (job->generation_fd >= 0) {
    inherit[inherit_count++] = job->generation_fd;
  }
  even_process_params params = {.arguments = job->params->command,
                                .environment = environment->lines,
                                .cpus = device->cpus,
                                .cpu_count = job->params->unpinned ? 0 : device->cpu_count,
                                .join = join,
                                .inherit = inherit,
                                .inherit_count = inherit_count,
                                .descriptors = job->descriptors_before};
  even_status status = even_process_start(&params, process);
  if (status != EVEN_OK) {
    (void)even_error_prefix("rank %zu on %s", index, device->name);
    (void)even_error_place((int)index, device->name);
  }
  return status;
}

even_status even_job_start_rank(even_job *job, size_t index) {
  even_job_rank *rank = &job->ranks[index];
  const even_rank_place place = {
      .rank = (int)index,
      .devices = job->params->devices,
      .spares = job->params->spares,
      .joins = even_job_is_outside(job, index),
      .first = (int)job->first,
      .local = (int)job->local,
      .group = job->group,
      .groups = job->groups,
      .era = job->era,
      .master_address = job->master_address,
      .interface = job->interface,
      .master_port = job->master_port,
      .attempt = job->attempt,
      .max_restarts = job->params->max_restarts,
      .telemetry_fd = job->params->telemetry_fd,
      .snapshot_fd = even_job_snapshot_begin(job, index),
      .generation_fd = job->generation_fd,
      .job = job->id,
      .run_folder = job->run_folder.data,
      .resume = job->resume.length > 0 && !even_job_is_outside(job, index) ? job->resume.data : NULL};
  even_environment environment;
  even_process process;
  int log = -1;
  EVEN_TRY(open_log(job, index, &log));
  even_status status = even_environment_of_rank(&place, environ, job->params->environment, &environment);
  if (status == EVEN_OK) {
    status = start_process(job, index, &environment, &process);
    even_environment_free(&environment);
  }
  if (status != EVEN_OK) {
    even_pipe_close(log);
    return status;
  }
  rank->pid = process.pid;
  rank->alive = true;
  rank->output_open = true;
  job->alive++;
  if (job->generation != NULL) {
    even_generation_started(job->generation, (int)index, (uint32_t)rank->pid);
  }
  status = even_job_guard_rank(job, rank->pid);
  if (job->params->observer.rank_started != NULL) {
    job->params->observer.rank_started(job->params->observer.context, (int)index, process.pid);
  }
  even_status opened =
      even_rank_output_open(&rank->output, &job->loop, (int)index, process.output, process.error, log, give_line, job);
  return status == EVEN_OK ? opened : status;
}

void even_job_reset_rank(even_job *job, size_t rank) {
  even_job_rank *own = &job->ranks[rank];
  if (own->output_open) {
    even_rank_output_close(&own->output);
  }
  memset(own, 0, sizeof *own);
  own->elsewhere = rank < job->first || rank >= job->first + job->local;
  own->output = (even_rank_output){
      .loop = &job->loop, .rank = (int)rank, .log = -1, .streams = {{.watch = {.fd = -1}}, {.watch = {.fd = -1}}}};
  own->output_open = own->elsewhere; /* its tails come from its host */
}

static even_status reset(even_job *job) {
  for (size_t i = 0; i < job->count; i++) {
    even_job_reset_rank(job, i);
  }
  job->ended = 0;
  job->alive = 0;
  job->stage = EVEN_JOB_RUNS;
  job->flights_told = false;
  even_job_flights_forget(job);
  even_oom_watch_close(&job->oom);
  even_oom_watch_open(&job->oom);
  even_progress_begin(&job->progress);
  even_hangs_begin(job->hangs);
  job->awaits_joiner = job->too_few_told = false;
  even_job_drain_forget(job);
  return even_job_generations_begin(job);
}

/* The agent itself failed: nothing may stay behind. */
static void abandon(even_job *job) {
  even_job_hosts_signal(job, SIGKILL, true, true);
  for (size_t i = 0; i < job->count; i++) {
    if (job->ranks[i].alive && !job->ranks[i].elsewhere) {
      (void)even_process_signal_group(job->ranks[i].pid, SIGKILL);
      even_process_wait(job->ranks[i].pid);
    }
    job->ranks[i].alive = false;
  }
  job->alive = 0;
}

/* Other hosts clear up their part, too, before the next attempt begins. */
static even_status await_hosts(even_job *job) {
  uint64_t since_ns = even_clock_ns();
  even_status status = EVEN_OK;
  while (status == EVEN_OK && !even_job_hosts_settled(job, since_ns)) {
    status = turn(job);
  }
  return status;
}

even_status even_job_run_attempt(even_job *job) {
  EVEN_TRY(reset(job));
  if (job->follower == NULL) {
    EVEN_TRY(even_port_free(&job->master_port));
  }
  even_status status = even_job_hosts_begin(job); /* first: what they do until their ranks run takes its time, too */
  for (size_t i = job->first; status == EVEN_OK && i < job->first + job->local; i++) {
    status = even_job_start_rank(job, i);
  }
  while (status == EVEN_OK && (job->alive > 0 || even_job_replace_waits(job))) {
    status = turn(job);
  }
  if (job->alive > 0) {
    abandon(job);
  } else if (job->places != NULL) {
    even_job_hosts_signal(job, SIGKILL, true, true); /* who waits there to fill a place waits no more */
  }
  even_job_sweep(job);
  even_job_snapshots_finish(job);
  return status == EVEN_OK ? await_hosts(job) : status;
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
                            .out_of_memory = rank->elsewhere ? rank->out_of_memory : met_oom_killer(job, rank),
                            .leave = rank->awaited ? EVEN_LEAVE_BEFORE_JOINING : EVEN_LEAVE_NONE,
                            .steps_known = job->progress.reader != NULL && job->progress.ranks[index].joined,
                            .steps = job->progress.ranks[index].stepped ? job->progress.ranks[index].last_step + 1 : 0,
                            .signal = rank->end.signal,
                            .code = rank->end.code,
                            .peak_memory_bytes = rank->end.peak_memory_bytes,
                            .error = error->data,
                            .error_length = error->length,
                            .output = output->data,
                            .output_length = output->length};
}

void even_job_forget_attempt(even_job *job) {
  for (size_t i = 0; i < job->count; i++) {
    if (job->ranks[i].output_open) {
      even_rank_output_close(&job->ranks[i].output);
      job->ranks[i].output_open = false;
    }
  }
}
