/* Starts a job: sets it up, runs the agent, tells how it ended. */
#include "cli/job.h"

#include "base/fail.h"
#include "base/json_writer.h"
#include "cli/job_setup.h"
#include "cli/job_view.h"
#include "orchestrator/agent.h"
#include "os/clock.h"
#include "os/pipe.h"
#include "os/signals.h"

#include <evenstep/telemetry.h>
#include <string.h>

typedef struct running_job {
  const even_job_options *options;
  even_job_setup setup;
  even_job_view view;
  int telemetry_fd;
  int restarts;
  char cause[640]; /* of the last failure, "" for none */
} running_job;

static void on_attempt(void *context, int attempt) {
  running_job *job = context;
  job->restarts = attempt;
  even_job_view_attempt(&job->view);
}

static void on_rank_ended(void *context, int rank, even_rank_end end, int code, const char *cause,
                          const char *traceback) {
  running_job *job = context;
  bool first = !job->view.failed;
  even_job_view_end(&job->view, rank, end, code, cause, traceback);
  if (first && job->view.failed) {
    (void)snprintf(job->cause, sizeof job->cause, "%s", cause);
  }
}

static void on_line(void *context, int rank, bool error, const char *text, size_t length) {
  even_job_view_line(&((running_job *)context)->view, rank, error, text, length);
}

static void on_notice(void *context, const char *text) {
  even_job_view_notice(&((running_job *)context)->view, text);
}

static void on_tick(void *context) {
  even_job_view_tick(&((running_job *)context)->view);
}

static even_status run(running_job *job, int *exit_code) {
  const even_agent_params params = {.size = sizeof params,
                                    .devices = &job->setup.devices,
                                    .command = job->setup.command,
                                    .run_folder = job->setup.run_folder.data,
                                    .environment = job->setup.environment.lines,
                                    .cpu_quota = job->setup.quota,
                                    .telemetry_fd = job->telemetry_fd,
                                    .unpinned = job->options->no_pin,
                                    .max_restarts = job->setup.max_restarts,
                                    .restart_always = job->setup.restart_always,
                                    .checkpoint_folder = job->setup.checkpoint_folder.data,
                                    .resume = job->options->resume,
                                    .observer = {.context = job,
                                                 .attempt = on_attempt,
                                                 .rank_ended = on_rank_ended,
                                                 .line = on_line,
                                                 .tick = on_tick,
                                                 .notice = on_notice}};
  return even_agent_run(&params, exit_code);
}

static void print_outcome(const running_job *job, int exit_code, double seconds) {
  even_text text = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&text, 0);
  even_json_object(&json, NULL);
  even_json_integer(&json, "exit_code", exit_code);
  even_json_string(&json, "run_folder", job->setup.run_folder.data);
  even_json_integer(&json, "ranks", (int64_t)job->setup.devices.count);
  even_json_integer(&json, "restarts", job->restarts);
  even_json_number(&json, "seconds", seconds);
  even_json_string(&json, "cause", job->cause[0] != '\0' ? job->cause : NULL);
  even_json_object_end(&json);
  if (even_text_status(&text) == EVEN_OK) {
    (void)printf("%s\n", text.data);
  }
  even_text_free(&text);
}

static void tell_outcome(const running_job *job, int exit_code, double seconds) {
  if (job->options->json) {
    print_outcome(job, exit_code, seconds);
  }
  if (!job->options->quiet) {
    (void)fprintf(stderr, "evenstep: %s %s after %.1f s; logs in %s/logs\n", job->setup.run_name.data,
                  exit_code == 0 ? "ended well" : "failed", seconds, job->setup.run_folder.data);
  }
}

static even_status open_and_run(running_job *job, int *exit_code) {
  uint64_t started = even_clock_ns();
  EVEN_TRY(even_telemetry_create_segment((int)job->setup.devices.count, 0, &job->telemetry_fd));
  even_job_view_open(&job->view, job->options->quiet, job->options->json, job->setup.shown,
                     (int)job->setup.devices.count);
  even_status status = run(job, exit_code);
  even_job_view_close(&job->view);
  even_pipe_close(job->telemetry_fd);
  if (status == EVEN_OK) {
    tell_outcome(job, *exit_code, (double)(even_clock_ns() - started) * 1e-9);
  }
  return status;
}

int even_job_start(const even_job_options *options, const char *command, char *const *environment, size_t count,
                   char **words) {
  running_job job;
  int exit_code = 0;
  memset(&job, 0, sizeof job);
  job.options = options;
  job.telemetry_fd = -1;
  (void)command;
  if (even_job_setup_open(options, environment, count, words, &job.setup) != EVEN_OK) {
    return even_cli_fail();
  }
  even_status status = even_signals_block(); /* before the monitor starts threads */
  if (status == EVEN_OK) {
    status = open_and_run(&job, &exit_code);
  }
  even_job_setup_close(&job.setup);
  return status == EVEN_OK ? exit_code : even_cli_fail();
}
