/* Starts the process of a rank. */
#include "base/fail.h"
#include "orchestrator/environment.h"
#include "orchestrator/hangs.h"
#include "orchestrator/host_memory.h"
#include "orchestrator/job_attempt.h"
#include "orchestrator/outlast.h"
#include "orchestrator/remote.h"
#include "orchestrator/remote_start.h"
#include "orchestrator/standing.h"
#include "orchestrator/warm.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/lease_sign.h"
#include "os/pipe.h"
#include "os/process_stat.h"
#include "os/socket.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

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

static even_status append_to_log(even_job *job, size_t rank, int *log) {
  even_text path = EVEN_TEXT_EMPTY;
  even_text_format(&path, "%s/logs/rank-%zu.log", job->run_folder.data, rank);
  even_status status = even_text_status(&path);
  if (status == EVEN_OK) {
    status = even_log_open(path.data, log);
    if (status != EVEN_OK) {
      (void)even_error_fix(
          "each host writes its ranks' logs into the run folder's path: let it be writable there, or "
          "name another one with --runs-dir");
    }
  }
  even_text_free(&path);
  return status;
}

static even_status open_log(even_job *job, size_t rank, int *log) {
  EVEN_TRY(append_to_log(job, rank, log));
  write_header(job, *log, rank, job->params->command);
  return EVEN_OK;
}

static void give_line(void *context, int rank, bool error, const char *text, size_t length) {
  const even_agent_observer *observer = &((even_job *)context)->params->observer;
  even_hangs_output(((even_job *)context)->hangs, rank);
  even_job_tell_main_rank(context); /* of ranks that outlasted their leader nobody here was told it */
  if (observer->line != NULL) {
    observer->line(observer->context, rank, error, text, length);
  }
}

even_status even_job_read_output(even_job *job, size_t rank, int output, int error) {
  int log = -1;
  even_status status = append_to_log(job, rank, &log);
  if (status != EVEN_OK) {
    even_pipe_close(output);
    even_pipe_close(error);
    return status;
  }
  job->ranks[rank].output_open = true;
  return even_rank_output_open(&job->ranks[rank].output, &job->loop, (int)rank, output, error, log, give_line, job);
}

static even_status start_process(even_job *job, size_t index, const even_environment *environment,
                                 even_process *process) {
  const even_device *device = &job->params->devices->items[index];
  char *const join[] = {(char *)even_slowdown_join(&job->slow, index), NULL};
  int inherit[4];
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
  if (even_job_standing_fd(job) >= 0) {
    inherit[inherit_count++] = even_job_standing_fd(job);
  }
  even_process_params params = {.arguments = job->params->command,
                                .environment = environment->lines,
                                .cpus = device->cpus,
                                .cpu_count = job->params->unpinned ? 0 : device->cpu_count,
                                .join = join,
                                .inherit = inherit,
                                .inherit_count = inherit_count,
                                .descriptors = job->descriptors_before,
                                .ignored = job->params->notice_seconds > 0 ? SIGUSR1 : 0,
                                .outlives = even_outlast_holds(job)};
  even_status status = even_process_start(&params, process);
  if (status != EVEN_OK) {
    (void)even_error_prefix("rank %zu on %s", index, device->name);
    (void)even_error_place((int)index, device->name);
  }
  return status;
}

/* One that waits for it, or a new one. */
static even_status find_process(even_job *job, const even_rank_place *place, even_warm_process *out) {
  even_environment environment;
  *out = (even_warm_process){.process = {.pid = -1}};
  if (job->warm != NULL && even_warm_take(*job->warm, place, job->params->environment, out)) {
    job->ranks[place->rank].started_early = true;
    return EVEN_OK;
  }
  EVEN_TRY(even_environment_of_rank(place, environ, job->params->environment, &environment));
  even_status status = start_process(job, (size_t)place->rank, &environment, &out->process);
  even_environment_free(&environment);
  return status;
}

void even_job_name_shortages(const even_job *job, even_text *out) {
  for (size_t i = 0; job->follower == NULL && i < job->count; i++) {
    even_shortages_add(&job->shortages, even_job_host_name(job, i), job->params->devices->items[i].name, i, out);
  }
}

/* Whether it is known on this host that the job has its run folder, for a rank that may look first when another job has
 * it. */
static bool sign_is_seen(const even_job *job) {
  const char *folder = even_environment_value(job->params->environment, "EVENSTEP_RUN_SIGN");
  return folder != NULL && even_lease_is_known(folder, job->id);
}

/* Below whom the rank will be as long as it lives: this process, or the one that starts another in its place. */
static void read_keeper(const even_job *job, even_process_stat *out) {
  if (job->outlast != NULL) {
    out->pid = (pid_t)job->params->legacy->starter;
    out->start_time = job->params->legacy->starter_start;
  } else if (even_process_stat_read(0, out) != 0) {
    out->pid = 0; /* without /proc */
  }
}

static even_status start_rank(even_job *job, size_t index, const char *shortages) {
  even_job_rank *rank = &job->ranks[index];
  even_process_stat keeper = {.pid = 0};
  read_keeper(job, &keeper);
  const even_rank_place place = {
      .rank = (int)index,
      .devices = job->params->devices,
      .spares = job->params->spares,
      .first_spare = (int)job->first_spare,
      .joins = even_job_is_outside(job, index),
      .first = (int)job->first,
      .local = (int)job->local,
      .group = job->group,
      .groups = job->groups,
      .era = job->era,
      .keeper = even_legacy_keeper(job->params->legacy),
      .master_address = job->master_address,
      .interface = job->interface,
      .master_port = job->master_port,
      .attempt = job->attempt,
      .turn = job->turn,
      .silence_ms = job->hosts != NULL || job->follower != NULL ? even_socket_silence() : 0,
      .unseen_seconds = even_remote_unseen_seconds(job),
      .max_restarts = job->params->max_restarts,
      .telemetry_fd = job->params->telemetry_fd,
      .snapshot_fd = even_job_snapshot_begin(job, index),
      .generation_fd = job->generation_fd,
      .standing_fd = even_job_standing_fd(job),
      .agent = keeper.pid,
      .agent_start = keeper.start_time,
      .job = job->id,
      .memory = job->params->memory == NULL ? NULL : job->params->memory->folder.data,
      .run_folder = job->run_folder.data,
      .sign_seen = sign_is_seen(job),
      .shortages = shortages,
      .resume = job->resume.length > 0 && !even_job_is_outside(job, index) ? job->resume.data : NULL};
  even_warm_process started;
  int log = -1;
  EVEN_TRY(open_log(job, index, &log));
  even_outlast_starting(job, index);
  even_status status = find_process(job, &place, &started);
  if (status != EVEN_OK) {
    even_pipe_close(log);
    return status;
  }
  const even_process process = started.process;
  even_process_stat facts;
  even_outlast_started(job, index, &process);
  rank->pid = process.pid;
  rank->start_time = even_process_stat_read(process.pid, &facts) == 0 ? facts.start_time : 0;
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
  for (int i = 0; i < 2; i++) {
    even_rank_output_take(&rank->output, i, even_text_string(&started.said[i]), started.said[i].length);
    even_text_free(&started.said[i]);
  }
  return status == EVEN_OK ? opened : status;
}

even_status even_job_start_rank(even_job *job, size_t index) {
  even_text shortages = EVEN_TEXT_EMPTY;
  even_job_name_shortages(job, &shortages);
  even_status status = even_text_status(&shortages);
  if (status == EVEN_OK) {
    status = start_rank(job, index, shortages.length > 0 ? shortages.data : NULL);
  }
  even_text_free(&shortages);
  return status;
}

void even_job_reset_rank(even_job *job, size_t rank) {
  even_job_rank *own = &job->ranks[rank];
  if (own->output_open) {
    even_rank_output_close(&own->output);
  }
  memset(own, 0, sizeof *own);
  own->elsewhere = !even_job_is_here(job, rank);
  own->output = (even_rank_output){
      .loop = &job->loop, .rank = (int)rank, .log = -1, .streams = {{.watch = {.fd = -1}}, {.watch = {.fd = -1}}}};
  own->output_open = own->elsewhere; /* its tails come from its host */
}
