/* Runs jobs of shell scripts. */
#include "job_fixture.h"
#include "os/clock.h"
#include "support/fault.h"

#include <errno.h>
#include <evenstep/checkpoint.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

void job_fixture_open(job_fixture *job) {
  memset(job, 0, sizeof *job);
  (void)strcpy(job->folder, "/tmp/evenstep-job-XXXXXX");
  assert_non_null(mkdtemp(job->folder));
  (void)snprintf(job->run_folder, sizeof job->run_folder, "%s/run", job->folder);
  (void)snprintf(job->checkpoints, sizeof job->checkpoints, "%s/checkpoints", job->folder);
  for (int i = 0; i < 2; i++) {
    (void)snprintf(job->devices[i].name, sizeof job->devices[i].name, "cpu:%d", i);
    job->devices[i].cores = 1;
    job->devices[i].cuda_index = -1;
  }
  job->list = (even_device_list){job->devices, 2};
  assert_int_equal(even_telemetry_create_segment(2, 64, &job->telemetry_fd), EVEN_OK);
}

void job_fixture_close(job_fixture *job) {
  char command[128];
  (void)snprintf(command, sizeof command, "rm -rf %s", job->folder);
  assert_int_equal(system(command), 0);
  assert_int_equal(close(job->telemetry_fd), 0);
  even_text_free(&job->seen);
}

static void on_attempt(void *context, int attempt) {
  job_fixture *job = context;
  even_text_format(&job->seen, "attempt %d|", attempt);
  if (job->on_attempt != NULL) {
    job->on_attempt(job, attempt);
  }
}

static void on_gone(void *context, int rank) {
  even_text_format(&((job_fixture *)context)->seen, "gone %d|", rank);
}

static void on_started(void *context, int rank, pid_t pid) {
  job_fixture *job = context;
  job->pids[rank] = pid;
  even_text_format(&job->seen, "started %d|", rank);
}

static void on_ended(void *context, int rank, even_rank_end end, int code, const char *cause, const char *traceback) {
  (void)traceback;
  even_text_format(&((job_fixture *)context)->seen, "ended %d %d %d %s|", rank, (int)end, code, cause);
}

static void on_line(void *context, int rank, bool error, const char *text, size_t length) {
  job_fixture *job = context;
  char line[256];
  (void)error;
  (void)snprintf(line, sizeof line, "%.*s", (int)length, text);
  even_text_format(&job->seen, "line %d %s|", rank, line);
  if (job->on_line != NULL) {
    job->on_line(job, rank, line);
  }
}

static void on_tick(void *context) {
  job_fixture *job = context;
  if (job->on_tick != NULL) {
    job->on_tick(job);
  }
}

static void on_notice(void *context, const char *text) {
  job_fixture *job = context;
  even_text_format(&job->seen, "notice %s|", text);
  if (job->on_notice != NULL) {
    job->on_notice(job, text);
  }
}

static void on_hang(void *context, int rank, bool over, const char *words) {
  even_text_format(&((job_fixture *)context)->seen, "hang %d %d %s|", rank, (int)over, words);
}

int job_fixture_setup(void **state) {
  job_fixture *job = malloc(sizeof *job);
  assert_non_null(job);
  job_fixture_open(job);
  *state = job;
  return 0;
}

int job_fixture_teardown(void **state) {
  fault_reset();
  assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
  assert_int_equal(errno, ECHILD);
  job_fixture_close(*state);
  free(*state);
  return 0;
}

even_status job_fixture_run(job_fixture *job, const char *script, int *exit_code) {
  char folder[96];
  char *const command[] = {(char *)"sh", (char *)"-c", (char *)(uintptr_t)script, NULL};
  (void)snprintf(folder, sizeof folder, "FOLDER=%s", job->folder);
  char *const environment[] = {folder, NULL};
  const even_agent_params params = {.size = sizeof params,
                                    .devices = &job->list,
                                    .command = command,
                                    .run_folder = job->run_folder,
                                    .environment = environment,
                                    .cpu_quota = job->quota,
                                    .telemetry_fd = job->telemetry_fd,
                                    .max_restarts = job->max_restarts,
                                    .restart_always = job->restart_always,
                                    .hang_seconds = job->hang_seconds,
                                    .restart_hung = job->restart_hung,
                                    .notice_seconds = job->notice_seconds,
                                    .notice_from = job->notice_from,
                                    .notice_every_seconds = job->notice_every_seconds,
                                    .shrink = job->shrink,
                                    .replace = job->replace,
                                    .legacy = job->legacy,
                                    .aside = job->aside,
                                    .checkpoint_folder = job->checkpoints,
                                    .resume = job->resume,
                                    .elsewhere = job->elsewhere,
                                    .observer = {.context = job,
                                                 .attempt = on_attempt,
                                                 .rank_started = on_started,
                                                 .rank_gone = on_gone,
                                                 .rank_ended = on_ended,
                                                 .line = on_line,
                                                 .tick = on_tick,
                                                 .check = job->check,
                                                 .hang = on_hang,
                                                 .notice = on_notice}};
  return even_agent_run(&params, exit_code);
}

void job_fixture_event(const job_fixture *job, int rank, even_event event) {
  job_fixture_event_of(job, rank, event, 0);
}

void job_fixture_event_of(const job_fixture *job, int rank, even_event event, int64_t value) {
  even_telemetry *ring = NULL;
  const even_event_record record = {.event = (uint32_t)event, .value = value, .at_ns = even_clock_ns()};
  assert_int_equal(even_telemetry_open(job->telemetry_fd, rank, &ring), EVEN_OK);
  even_telemetry_event(ring, &record);
  even_telemetry_close(ring);
}

void job_fixture_touch(const job_fixture *job, const char *name) {
  char path[128];
  (void)snprintf(path, sizeof path, "%s/%s", job->folder, name);
  int file = open(path, O_WRONLY | O_CREAT, 0666);
  assert_true(file >= 0);
  assert_int_equal(close(file), 0);
}

bool job_fixture_saw(const job_fixture *job, const char *text) {
  return strstr(even_text_string(&job->seen), text) != NULL;
}

static void write_checkpoint(const job_fixture *job, const char *name, const char *state) {
  even_checkpoint_writer *writer = NULL;
  char path[160];
  const float value[2] = {1, 2};
  const int64_t shape[1] = {2};
  const even_checkpoint_tensor tensor = {
      .name = "w", .dtype = "F32", .shape = shape, .dimensions = 1, .data = value, .bytes = sizeof value};
  (void)snprintf(path, sizeof path, "%s/%s", job->folder, name);
  const even_checkpoint_params params = {.size = sizeof params, .folder = path};
  const even_checkpoint_file file = {
      .size = sizeof file, .name = "model.safetensors", .tensors = &tensor, .tensor_count = 1};
  assert_int_equal(even_checkpoint_writer_open(&params, &writer), EVEN_OK);
  assert_int_equal(even_checkpoint_writer_add(writer, &file), EVEN_OK);
  assert_int_equal(even_checkpoint_writer_commit(writer, state), EVEN_OK);
}

void job_fixture_write_checkpoint_in(job_fixture *job, const char *name, const char *state) {
  write_checkpoint(job, name, state);
}

void job_fixture_write_checkpoint(job_fixture *job, const char *name) {
  write_checkpoint(job, name, "{\"step\":1}");
}

void job_fixture_write_checkpoint_of(job_fixture *job, const char *name, const char *lineage, const char *writer) {
  char state[160];
  (void)snprintf(state, sizeof state, "{\"step\":1,\"lineage\":\"%s\",\"job\":\"%s\"}", lineage, writer);
  write_checkpoint(job, name, state);
}
