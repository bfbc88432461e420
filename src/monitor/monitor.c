/* The monitor of a living run: opened, told by the agent, ticked, closed. */
#include "monitor/monitor.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/utf8.h"
#include "monitor/gpus.h"
#include "monitor/lagging.h"
#include "monitor/parts.h"
#include "monitor/report.h"
#include "monitor/slow_links.h"
#include "monitor/takeover.h"
#include "monitor/thin.h"
#include "monitor/view.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/path.h"
#include "os/random.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const uint64_t COMMIT_EVERY_NS = 1000000000;
/* Of an attempt, committed at each tick: who follows the file learns at once that the job goes on. */
enum { FIRST_STEPS = 64 };
static const uint64_t USAGE_EVERY_NS = 1000000000;

static even_status report_trouble(even_monitor *monitor) {
  if (monitor->trouble.status == EVEN_OK) {
    return EVEN_OK;
  }
  even_error trouble = monitor->trouble;
  monitor->trouble.status = EVEN_OK;
  (void)even_fail(trouble.status, "%s", trouble.what);
  return even_error_fix("%s", trouble.fix);
}

/* Of a rank elsewhere: what was told of it since the last time. */
static bool look_at(even_state_rank *at, uint64_t now, even_rank_usage *usage) {
  if (at->pid == 0 || !at->elsewhere) {
    return at->pid != 0 && even_usage_look(at->pid, now, &at->usage, usage);
  }
  *usage = at->usage_told;
  at->usage_told.at_ns = 0;
  return usage->at_ns != 0;
}

static void look(even_monitor *monitor, uint64_t now) {
  for (int rank = 0; rank < monitor->state->ranks; rank++) {
    even_rank_usage usage;
    even_call_totals totals;
    even_state_rank *at = &monitor->state->rank[rank];
    bool there = look_at(at, now, &usage);
    even_telemetry_reader_totals(monitor->reader, rank, &totals);
    bool called = memcmp(&totals, &at->calls.now, sizeof totals) != 0;
    even_state_calls_seen(monitor->state, rank, now, &totals);
    if (there) {
      even_state_usage(monitor->state, rank, &usage);
    }
    if (there || called) { /* of one that has ended meanwhile, the last calls */
      EVEN_HISTORY(even_database_usage(monitor->database, rank, now, there ? &usage : NULL, &totals));
    }
  }
}

even_status even_monitor_tick(even_monitor *monitor) {
  uint64_t now = even_clock_ns();
  (void)pthread_mutex_lock(&monitor->lock);
  if (monitor->first_notice[0] != '\0' && monitor->notice != NULL) {
    monitor->notice(monitor->notice_context, monitor->first_notice);
  }
  monitor->first_notice[0] = '\0';
  (void)even_monitor_drain(monitor);
  bool due = now - monitor->looked_ns >= USAGE_EVERY_NS;
  if (due) {
    monitor->looked_ns = now;
    look(monitor, now);
  }
  even_monitor_gpus_look(monitor);
  even_lagging_look(monitor, now, due);
  if (due) {
    even_slow_links_look(monitor, now);
  }
  monitor->begins = monitor->begins && monitor->state->attempt_steps < FIRST_STEPS;
  if (now - monitor->committed_ns >= COMMIT_EVERY_NS || monitor->begins) {
    monitor->committed_ns = now;
    even_monitor_commit(monitor);
  }
  even_status status = report_trouble(monitor);
  (void)pthread_mutex_unlock(&monitor->lock);
  return status;
}

/* ---- what the agent tells ---- */

/* The one that ran when its agent was killed; a history that was begun anew does not know it. */
static void go_on(even_monitor *monitor, int attempt) {
  monitor->continues = false;
  if (attempt > monitor->state->attempt) {
    even_state_attempt(monitor->state, attempt, even_clock_ns());
  }
  monitor->begins = true;
}

static void restart(even_monitor *monitor, int attempt) {
  even_monitor_drain_ended(monitor); /* what the ranks of the attempt before wrote is still theirs */
  even_lagging_end_all(monitor);
  even_slow_links_end(monitor);
  even_state_attempt(monitor->state, attempt, even_clock_ns());
  monitor->begins = true;
  even_spikes_forget(&monitor->spikes);
  if (attempt > 0) {
    char words[64];
    (void)snprintf(words, sizeof words, "restart %d", attempt);
    even_monitor_note(monitor, EVEN_EVENT_ATTEMPT, -1, attempt, words);
    even_monitor_commit(monitor); /* records that follow are this attempt's, whoever reads them */
  }
}

void even_monitor_attempt(even_monitor *monitor, int attempt) {
  (void)pthread_mutex_lock(&monitor->lock);
  if (monitor->continues) {
    go_on(monitor, attempt);
  } else {
    restart(monitor, attempt);
  }
  (void)pthread_mutex_unlock(&monitor->lock);
}

void even_monitor_rank_started(even_monitor *monitor, int rank, pid_t pid) {
  (void)pthread_mutex_lock(&monitor->lock);
  if (rank >= 0 && rank < monitor->state->ranks) {
    even_state_rank *at = &monitor->state->rank[rank];
    bool runs_on = at->untold && at->last_pid == pid;
    at->pid = at->last_pid = pid;
    at->untold = false;
    if (!runs_on) {
      at->cause[0] = '\0';
      at->usage = at->usage_before = at->usage_told = (even_rank_usage){.throttled_seconds = NAN};
      EVEN_HISTORY(even_database_rank(monitor->database, rank, at, monitor->state->attempt, false));
      even_monitor_note(monitor, EVEN_EVENT_RANK_STARTED, rank, pid, at->device);
    }
  }
  (void)pthread_mutex_unlock(&monitor->lock);
}

void even_monitor_rank_gone(even_monitor *monitor, int rank) {
  (void)pthread_mutex_lock(&monitor->lock);
  (void)even_monitor_drain(monitor);
  even_lagging_end(monitor, rank);
  if (rank >= 0 && rank < monitor->state->ranks) {
    even_state_rank *at = &monitor->state->rank[rank];
    EVEN_HISTORY(even_database_rank(monitor->database, rank, at, monitor->state->attempt, true));
    at->pid = 0;
    at->untold = false;
  }
  (void)pthread_mutex_unlock(&monitor->lock);
}

void even_monitor_rank_ended(even_monitor *monitor, int rank, const char *cause) {
  (void)pthread_mutex_lock(&monitor->lock);
  (void)even_monitor_drain(monitor);
  if (rank >= 0 && rank < monitor->state->ranks) {
    even_state_rank *at = &monitor->state->rank[rank];
    (void)even_utf8_clean(cause == NULL ? "" : cause, at->cause, sizeof at->cause);
    EVEN_HISTORY(even_database_rank(monitor->database, rank, at, monitor->state->attempt, true));
    at->pid = 0;
    at->untold = false;
    even_monitor_note(monitor, EVEN_EVENT_RANK_ENDED, rank, 0, at->cause);
  }
  (void)pthread_mutex_unlock(&monitor->lock);
}

void even_monitor_hang(even_monitor *monitor, int rank, bool over, const char *words) {
  (void)pthread_mutex_lock(&monitor->lock);
  if (rank >= 0 && rank < monitor->state->ranks) {
    even_monitor_note(monitor, EVEN_EVENT_HANG, rank, over ? 0 : 1, words);
  }
  (void)pthread_mutex_unlock(&monitor->lock);
}

void even_monitor_straggler_ended(even_monitor *monitor, int rank, const char *words) {
  (void)pthread_mutex_lock(&monitor->lock);
  if (rank >= 0 && rank < monitor->state->ranks) {
    even_monitor_note(monitor, EVEN_EVENT_STRAGGLER_ENDED, rank, 0, words);
  }
  (void)pthread_mutex_unlock(&monitor->lock);
}

void even_monitor_usage(even_monitor *monitor, int rank, const even_rank_usage *usage, const even_gpu_sample *gpu) {
  (void)pthread_mutex_lock(&monitor->lock);
  even_state_rank *at = rank >= 0 && rank < monitor->state->ranks ? &monitor->state->rank[rank] : NULL;
  if (at != NULL && at->elsewhere && at->pid != 0) {
    at->usage_told = *usage;
    even_monitor_gpu_told(monitor, rank, gpu);
  }
  (void)pthread_mutex_unlock(&monitor->lock);
}

even_status even_monitor_view(even_monitor *monitor, int columns, bool colour, even_text *out) {
  (void)pthread_mutex_lock(&monitor->lock);
  even_view_draw(monitor->state, even_clock_ns(), columns, colour, out);
  (void)pthread_mutex_unlock(&monitor->lock);
  return even_text_status(out);
}

const char *even_monitor_url(const even_monitor *monitor) {
  return monitor->url;
}

/* ---- opening ---- */

static even_status meta_number(even_database *database, const char *key, long long value) {
  char digits[32];
  (void)snprintf(digits, sizeof digits, "%lld", value);
  return even_database_meta(database, key, digits);
}

static even_status write_meta(even_database *database, const even_state *state, long long calls) {
  EVEN_TRY(even_database_meta(database, "format", EVEN_DATABASE_FORMAT));
  EVEN_TRY(even_database_meta(database, "run", state->run_name));
  EVEN_TRY(even_database_meta(database, "command", state->command));
  EVEN_TRY(even_database_meta(database, "policy", state->policy));
  EVEN_TRY(meta_number(database, "ranks", state->ranks));
  EVEN_TRY(meta_number(database, "calls", calls));
  EVEN_TRY(meta_number(database, "started_ns", (long long)state->started_ns));
  EVEN_TRY(meta_number(database, "started_wall_ns", (long long)state->started_wall_ns));
  for (int rank = 0; rank < state->ranks; rank++) {
    EVEN_TRY(even_database_rank(database, rank, &state->rank[rank], 0, false));
  }
  return even_database_commit(database);
}

static int64_t rows_kept(const even_monitor_params *params) {
  if (params->step_rows != 0) {
    return params->step_rows < 0 ? INT64_MAX : params->step_rows;
  }
  int64_t least = (int64_t)params->ranks * EVEN_THIN_ROWS_A_RANK;
  return least > EVEN_THIN_STEP_ROWS ? least : EVEN_THIN_STEP_ROWS;
}

static void take_facts(even_state *state, int ranks, const even_monitor_rank *all) {
  for (int rank = 0; rank < ranks && all != NULL; rank++) {
    const even_monitor_rank *facts = &all[rank];
    char device[96];
    (void)snprintf(device, sizeof device, facts->host == NULL ? "%s" : "%s on %s", facts->device, facts->host);
    even_state_rank_facts(state, rank, device, facts->model, facts->cores, facts->quota);
    state->rank[rank].elsewhere = facts->host != NULL;
    if (facts->host != NULL) {
      (void)snprintf(state->rank[rank].host, sizeof state->rank[rank].host, "%s", facts->host);
    } else {
      even_host_name(state->rank[rank].host, sizeof state->rank[rank].host);
    }
  }
}

/* Whether the history of the killed agent is gone on with; else the first tick says why not. */
static bool take_over(even_monitor *monitor, const char *path, const even_database_limits *limits,
                      const even_monitor_params *params) {
  if (even_takeover_open(monitor, path, limits, params) == EVEN_OK) {
    (void)pthread_mutex_lock(&monitor->lock); /* the server reads them */
    take_facts(monitor->state, params->ranks, params->rank_facts);
    (void)pthread_mutex_unlock(&monitor->lock);
    return true;
  }
  (void)snprintf(monitor->first_notice, sizeof monitor->first_notice,
                 "the history of this run begins anew (what can be read of it is run-previous.db): %.380s",
                 even_error_last()->what);
  even_error_clear();
  return false;
}

/* A database that cannot be made is reported by the first tick, like one that breaks later. */
static even_status open_history(even_monitor *monitor, const even_monitor_params *params) {
  even_text path = EVEN_TEXT_EMPTY;
  even_text_format(&path, "%s/run.db", monitor->folder);
  even_status status = even_text_status(&path);
  if (status == EVEN_OK) {
    const even_database_limits limits = {
        .step_rows = rows_kept(params), .calls = params->calls, .ranks = params->ranks};
    if (params->continues && take_over(monitor, even_text_string(&path), &limits, params)) {
      even_text_free(&path);
      return EVEN_OK;
    }
    status = even_database_create(even_text_string(&path), &limits, &monitor->database);
    if (status == EVEN_OK) {
      EVEN_HISTORY(write_meta(monitor->database, monitor->state, params->calls));
      if (params->continues) {
        (void)pthread_mutex_lock(&monitor->lock);
        even_monitor_note(monitor, EVEN_EVENT_MESSAGE, -1, 0,
                          "the agent of this run was killed; its history could not be gone on with, and begins anew");
        (void)pthread_mutex_unlock(&monitor->lock);
      }
    } else {
      (void)even_error_prefix("the run goes on without history");
      monitor->trouble = *even_error_last();
    }
    status = EVEN_OK;
  }
  even_text_free(&path);
  return status;
}

static even_status open_lagging(even_monitor *monitor, int ranks) {
  const even_monitor_limits *limits = &monitor->limits;
  return even_lagging_open(ranks, limits->straggler_factor, limits->straggler_seconds, &monitor->lagging);
}

static even_status open_parts(even_monitor *monitor, const even_monitor_params *params) {
  size_t ranks = (size_t)params->ranks;
  EVEN_TRY(even_duplicate(params->run_folder, &monitor->folder));
  EVEN_TRY(EVEN_NEW_ARRAY(&monitor->records, EVEN_MONITOR_RECORDS_AT_ONCE));
  EVEN_TRY(even_state_open(params->ranks, params->run_name, params->command, params->policy, &monitor->state));
  EVEN_TRY(even_alloc(ranks, sizeof *monitor->pending, (void **)&monitor->pending));
  EVEN_TRY(EVEN_NEW_ARRAY(&monitor->places, ranks));
  EVEN_TRY(even_telemetry_reader_open(params->telemetry_fd, &monitor->reader));
  monitor->limits = params->limits;
  EVEN_TRY(open_lagging(monitor, params->ranks));
  EVEN_TRY(even_links_open(&monitor->links));
  even_links_limit(monitor->links, params->limits.link_factor, params->limits.link_seconds);
  monitor->state->started_ns = even_clock_ns();
  monitor->state->started_wall_ns = even_clock_wall_ns();
  monitor->state->last_end_ns = monitor->state->started_ns;
  monitor->notice = params->notice;
  monitor->notice_context = params->notice_context;
  monitor->spikes.deviations = params->loss_spike;
  monitor->calls_a_tick = EVEN_MONITOR_CALLS_A_TICK;
  take_facts(monitor->state, params->ranks, params->rank_facts);
  EVEN_TRY(even_folder_make(params->run_folder));
  EVEN_TRY(even_random_hex(monitor->token, EVEN_SERVER_TOKEN_DIGITS));
  EVEN_TRY(even_monitor_serve(monitor, params)); /* before the database: a port in use must not touch the history */
  monitor->continues = params->continues;
  EVEN_TRY(open_history(monitor, params));
  EVEN_TRY(even_monitor_gpus_open(monitor, params));
  even_telemetry_reader_want_calls(monitor->reader, params->calls > 0);
  even_status status = even_monitor_agent_file_write(monitor);
  if (status == EVEN_ERR_NO_SPACE) { /* the run goes on; the first tick says it */
    if (monitor->trouble.status == EVEN_OK) {
      monitor->trouble = *even_error_last();
    }
    return EVEN_OK;
  }
  return status;
}

static void release(even_monitor *monitor) {
  even_server_close(monitor->server);
  even_gpu_watch_close(monitor->gpus);
  even_lagging_close(monitor->lagging);
  even_links_close(monitor->links);
  even_database_close(monitor->database);
  even_telemetry_reader_close(monitor->reader);
  even_state_close(monitor->state);
  even_free(monitor->pending);
  even_free(monitor->places);
  even_free(monitor->records);
  even_free(monitor->folder);
  (void)pthread_mutex_destroy(&monitor->lock);
  even_free(monitor);
}

even_status even_monitor_open(const even_monitor_params *params, even_monitor **out) {
  even_monitor *monitor = NULL;
  *out = NULL;
  if (params->size != sizeof *params || params->ranks < 1 || params->run_folder == NULL) {
    return even_fail(EVEN_ERR_ARGUMENT, "the monitor of a run of %d ranks", params->ranks);
  }
  EVEN_TRY(EVEN_NEW(&monitor));
  (void)pthread_mutex_init(&monitor->lock, NULL);
  even_status status = open_parts(monitor, params);
  if (status != EVEN_OK) {
    even_error kept = *even_error_last();
    release(monitor);
    (void)even_fail(status, "%s", kept.what);
    return even_error_fix("%s", kept.fix);
  }
  *out = monitor;
  return EVEN_OK;
}

/* ---- other ranks ---- */

/* Hosts may join while ranks run: these keep their numbers. */
static bool any_runs(const even_state *state) {
  for (int rank = 0; rank < state->ranks; rank++) {
    if (state->rank[rank].pid != 0) {
      return true;
    }
  }
  return false;
}

static void watch_no_more(even_monitor *monitor) {
  for (int rank = 0; rank < monitor->state->ranks; rank++) {
    monitor->state->rank[rank].gpu_slow = false; /* numbers go to other GPUs */
  }
  even_slow_links_end(monitor);
  even_lagging_end_all(monitor);
  even_lagging_close(monitor->lagging);
  monitor->lagging = NULL;
  even_gpu_watch_close(monitor->gpus);
  monitor->gpus = NULL;
}

/* Those that go on beside others are watched as before. */
static even_status watch(even_monitor *monitor, int ranks, const char *const *gpus) {
  const even_monitor_params params = {.ranks = ranks, .gpus = gpus};
  if (monitor->lagging != NULL) {
    return even_lagging_grow(monitor->lagging, ranks);
  }
  EVEN_TRY(open_lagging(monitor, ranks));
  return even_monitor_gpus_open(monitor, &params);
}

static even_status follow(even_monitor *monitor, int ranks, const even_monitor_rank *facts, const char *const *gpus) {
  int before = monitor->state->room;
  if (any_runs(monitor->state) && ranks >= monitor->state->ranks) {
    (void)even_monitor_drain(monitor);
  } else {
    even_monitor_drain_ended(monitor); /* what the ranks of before wrote is theirs */
    watch_no_more(monitor);
  }
  if (ranks > before) { /* room first: each batch looks at all ranks of the state */
    EVEN_TRY(even_realloc((void **)&monitor->pending, (size_t)ranks, sizeof *monitor->pending));
    memset(&monitor->pending[before], 0, (size_t)(ranks - before) * sizeof *monitor->pending);
    EVEN_TRY(even_realloc((void **)&monitor->places, (size_t)ranks, sizeof *monitor->places));
    memset(&monitor->places[before], 0, (size_t)(ranks - before) * sizeof *monitor->places);
  }
  if (monitor->database != NULL) {
    EVEN_TRY(even_database_ranks(monitor->database, ranks));
  }
  EVEN_TRY(even_state_ranks(monitor->state, ranks));
  take_facts(monitor->state, ranks, facts);
  if (monitor->database != NULL) {
    EVEN_HISTORY(meta_number(monitor->database, "ranks", ranks));
  }
  return watch(monitor, ranks, gpus);
}

even_status even_monitor_ranks(even_monitor *monitor, int ranks, const even_monitor_rank *facts,
                               const char *const *gpus) {
  (void)pthread_mutex_lock(&monitor->lock);
  even_status status = follow(monitor, ranks, facts, gpus);
  (void)pthread_mutex_unlock(&monitor->lock);
  return status;
}

/* ---- closing ---- */

static even_status end_history(even_monitor *monitor, int exit_code) {
  if (monitor->database == NULL) {
    return EVEN_OK;
  }
  EVEN_TRY(meta_number(monitor->database, "ended_ns", (long long)monitor->state->ended_ns));
  EVEN_TRY(meta_number(monitor->database, "exit_code", exit_code));
  EVEN_TRY(meta_number(monitor->database, "lost_records", (long long)monitor->state->lost_records));
  return even_database_finish(monitor->database);
}

even_status even_monitor_close(even_monitor *monitor, int exit_code) {
  if (monitor == NULL) {
    return EVEN_OK;
  }
  (void)pthread_mutex_lock(&monitor->lock);
  even_monitor_drain_ended(monitor);
  look(monitor, even_clock_ns());
  even_monitor_gpus_look(monitor);
  even_lagging_end_all(monitor);
  even_slow_links_end(monitor);
  monitor->state->ended_ns = even_clock_ns();
  monitor->state->exit_code = exit_code;
  for (int rank = 0; rank < monitor->state->ranks; rank++) {
    monitor->state->rank[rank].pid = 0;
  }
  even_takeover_note(monitor);
  EVEN_HISTORY(end_history(monitor, exit_code));
  bool kept = monitor->database != NULL;
  (void)pthread_mutex_unlock(&monitor->lock);
  even_server_close(monitor->server);
  monitor->server = NULL;
  even_monitor_agent_file_remove(monitor);
  even_status status = report_trouble(monitor);
  if (status == EVEN_OK && kept) {
    status = even_report_write_page(monitor->folder);
  }
  even_database_close(monitor->database); /* the last to close folds the WAL into the database */
  monitor->database = NULL;
  even_error last = *even_error_last();
  release(monitor);
  if (status != EVEN_OK) {
    (void)even_fail(status, "%s", last.what);
    (void)even_error_fix("%s", last.fix);
  }
  return status;
}

void even_monitor_leave(even_monitor *monitor) {
  even_error kept = *even_error_last();
  if (monitor == NULL) {
    return;
  }
  even_database_leave(monitor->database);
  monitor->database = NULL;
  release(monitor);
  (void)even_error_restore(&kept);
}
