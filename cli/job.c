/* Starts a job: sets it up, runs the agent, tells how it ended. */
#include "cli/job.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_writer.h"
#include "base/stop.h"
#include "base/utf8.h"
#include "cli/job_aside.h"
#include "cli/job_fetch.h"
#include "cli/job_setup.h"
#include "cli/job_view.h"
#include "monitor/monitor.h"
#include "orchestrator/adopt.h"
#include "orchestrator/agent.h"
#include "orchestrator/outlast.h"
#include "os/clock.h"
#include "os/lease.h"
#include "os/pipe.h"
#include "os/process.h"
#include "os/signals.h"

#include <evenstep/balancer.h>
#include <evenstep/telemetry.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct running_job {
  const even_job_options *options;
  even_job_setup setup;
  even_job_view view;
  even_monitor *monitor; /* NULL with --no-monitor */
  bool monitor_failed;   /* told once, */
  bool unseen;           /* as is this */
  even_job_fetcher fetcher;
  even_job_devices all; /* what the job was given, while some are set aside */
  char url[256];
  int telemetry_fd;
  int restarts;
  int interrupted; /* the signal by which the user ended the job, 0 */
  char cause[640]; /* of the last failure, "" for none */
} running_job;

static void on_attempt(void *context, int attempt) {
  running_job *job = context;
  job->restarts = attempt;
  even_job_view_attempt(&job->view);
  if (job->monitor != NULL) {
    even_monitor_attempt(job->monitor, attempt);
  }
}

static void on_rank_started(void *context, int rank, pid_t pid) {
  running_job *job = context;
  if (job->monitor != NULL) {
    even_monitor_rank_started(job->monitor, rank, pid);
  }
}

static void on_rank_gone(void *context, int rank) {
  running_job *job = context;
  if (job->monitor != NULL) {
    even_monitor_rank_gone(job->monitor, rank);
  }
}

static void on_rank_ended(void *context, int rank, even_rank_end end, int code, const char *cause,
                          const char *traceback) {
  running_job *job = context;
  bool first = !job->view.failed;
  even_job_view_end(&job->view, rank, end, code, cause, traceback);
  if (first && job->view.failed) {
    (void)snprintf(job->cause, sizeof job->cause, "%s", cause);
    even_utf8_trim(job->cause);
  }
  if (job->monitor != NULL) {
    even_monitor_rank_ended(job->monitor, rank, cause);
  }
}

static void on_line(void *context, int rank, bool error, const char *text, size_t length) {
  even_job_view_line(&((running_job *)context)->view, rank, error, text, length);
}

static void on_main_rank(void *context, int rank) {
  even_job_view_main(&((running_job *)context)->view, rank);
}

static void on_interrupted(void *context, int signal) {
  running_job *job = context;
  job->interrupted = signal;
  even_job_view_interrupted(&job->view);
}

static void on_notice(void *context, const char *text) {
  even_job_view_notice(&((running_job *)context)->view, text);
}

static void on_hang(void *context, int rank, bool over, const char *words) {
  running_job *job = context;
  if (job->monitor != NULL) {
    even_monitor_hang(job->monitor, rank, over, words);
  }
}

static void on_straggler_ended(void *context, int rank, const char *words) {
  running_job *job = context;
  if (job->monitor != NULL) {
    even_monitor_straggler_ended(job->monitor, rank, words);
  }
}

static void on_usage(void *context, int rank, const even_rank_usage *usage, const even_gpu_sample *gpu) {
  running_job *job = context;
  if (job->monitor != NULL) {
    even_monitor_usage(job->monitor, rank, usage, gpu);
  }
}

static void on_gpu_fault(void *context, const even_gpu_news *news) {
  running_job *job = context;
  if (job->monitor != NULL) {
    even_monitor_gpu_fault(job->monitor, news);
  }
}

static even_status follow_monitor(running_job *job);

/* Into the attempt that runs: the page and the history have its ranks from now on. */
static void on_host_joined(void *context, const char *host, int first, const even_device_list *devices) {
  running_job *job = context;
  even_job_take_places(&job->setup, host, (size_t)first, devices);
  if (follow_monitor(job) != EVEN_OK) {
    even_job_view_notice(&job->view, even_error_last()->what);
    even_error_clear();
  }
}

/* Whether the run folder is another job's by now: nothing is written there any more. */
static even_status on_check(void *context) {
  return even_lease_check(((running_job *)context)->setup.lease);
}

static void on_tick(void *context) {
  running_job *job = context;
  if (on_check(job) != EVEN_OK) {
    even_error_clear(); /* the agent, which asks, too, says so */
    return;
  }
  if (!job->unseen && !even_lease_is_seen(job->setup.lease)) {
    job->unseen = true;
    even_job_tell_unseen(&job->setup, "its file system moves no times", on_notice, job);
  }
  if (job->monitor != NULL && even_monitor_tick(job->monitor) != EVEN_OK && !job->monitor_failed) {
    job->monitor_failed = true; /* the training is worth more than its history */
    even_job_view_notice(&job->view, even_error_last()->what);
  }
  even_job_view_tick(&job->view);
}

static void on_live(void *context, int columns, bool colour, even_text *out) {
  if (even_monitor_view(((running_job *)context)->monitor, columns, colour, out) != EVEN_OK) {
    even_text_clear(out);
  }
}

/* Of a leader that is gone the variable has come with its job. */
static const char *upload_place(const even_job_options *options) {
  return options->checkpoint_to == NULL && options->estate != NULL ? getenv("EVENSTEP_CHECKPOINT_TO")
                                                                   : options->checkpoint_to;
}

static bool follows_speeds(const char *policy) {
  return strcmp(policy, "equal") != 0 && strcmp(policy, "proportional") != 0;
}

/* EVENSTEP_RESTART_PAUSE=0: each restart follows at once. */
static bool is_paced(void) {
  const char *value = getenv("EVENSTEP_RESTART_PAUSE");
  return value == NULL || strcmp(value, "0") != 0;
}

static even_status run(running_job *job, int *exit_code) {
  job->fetcher = (even_job_fetcher){
      .python = job->options->python, .url = upload_place(job->options), .tell = on_notice, .context = job};
  const even_agent_params params = {.size = sizeof params,
                                    .devices = &job->setup.devices,
                                    .command = job->setup.command,
                                    .run_folder = job->setup.run_folder.data,
                                    .id = job->setup.id,
                                    .environment = job->setup.environment.lines,
                                    .cpu_quota = job->setup.quota,
                                    .telemetry_fd = job->telemetry_fd,
                                    .hang_seconds = job->setup.hang_seconds,
                                    .restart_hung = job->setup.restart_hung,
                                    .stop_grace_seconds = job->setup.stop_grace_seconds,
                                    .stop_seconds = job->setup.stop_seconds,
                                    .notice_seconds = job->setup.notice_seconds,
                                    .notice_from = job->setup.notice_from,
                                    .notice_every_seconds = job->setup.notice_every_seconds,
                                    .gpu_seconds = job->setup.watches.gpu_seconds,
                                    .on_straggler = job->setup.on_straggler,
                                    .straggler_gain = job->setup.straggler_gain,
                                    .straggler_seconds = job->setup.straggler_seconds,
                                    .straggler_pause_seconds = job->setup.straggler_pause_seconds,
                                    .shares_follow = follows_speeds(job->options->policy),
                                    .unpinned = job->options->no_pin,
                                    .max_restarts = job->setup.max_restarts,
                                    .restart_always = job->setup.restart_always,
                                    .paced = is_paced(),
                                    .shrink = job->setup.shrink,
                                    .replace = job->setup.replace,
                                    .spares = (int)job->setup.spares,
                                    .spare_hosts = job->setup.spare_hosts,
                                    .grows = job->setup.grows,
                                    .kept = (int)job->setup.kept,
                                    .least_ranks = job->options->min_ranks > 0 ? (int)job->options->min_ranks : 1,
                                    .checkpoint_folder = job->setup.checkpoint_folder.data,
                                    .resume = job->options->resume,
                                    .elsewhere = even_job_elsewhere(&job->fetcher),
                                    .hosts = job->setup.hosts,
                                    .estate = job->options->estate,
                                    .memory = job->setup.memory,
                                    .aside = job->options->set_aside ? &job->setup.aside : NULL,
                                    .shown = job->setup.shown,
                                    .legacy = job->options->legacy,
                                    .observer = {.context = job,
                                                 .attempt = on_attempt,
                                                 .rank_started = on_rank_started,
                                                 .rank_gone = on_rank_gone,
                                                 .rank_ended = on_rank_ended,
                                                 .line = on_line,
                                                 .tick = on_tick,
                                                 .check = on_check,
                                                 .hang = on_hang,
                                                 .straggler_ended = on_straggler_ended,
                                                 .usage = on_usage,
                                                 .gpu_fault = on_gpu_fault,
                                                 .interrupted = on_interrupted,
                                                 .host_joined = on_host_joined,
                                                 .main_rank = on_main_rank,
                                                 .notice = on_notice}};
  return even_agent_run(&params, exit_code);
}

static void print_outcome(running_job *job, int exit_code, double seconds) {
  even_text text = EVEN_TEXT_EMPTY;
  even_json json = even_json_begin(&text, 0);
  even_json_object(&json, NULL);
  even_json_integer(&json, "exit_code", exit_code);
  even_json_string(&json, "run_folder", job->setup.run_folder.data);
  even_json_integer(&json, "ranks", (int64_t)even_job_ranks_known(&job->setup));
  even_json_integer(&json, "restarts", job->restarts);
  even_json_number(&json, "seconds", seconds);
  even_json_string(&json, "url", job->url[0] != '\0' ? job->url : NULL);
  even_json_string(&json, "cause", job->cause[0] != '\0' ? job->cause : NULL);
  even_json_object_end(&json);
  if (even_text_status(&text) == EVEN_OK) {
    even_job_view_result(&job->view, text.data);
  }
  even_text_free(&text);
}

static void add_outcome(even_text *text, const running_job *job, int exit_code) {
  if (job->interrupted == SIGINT) {
    even_text_add(text, "was interrupted");
  } else if (job->interrupted != 0) {
    even_text_format(text, "was ended by %s", even_signal_name(job->interrupted));
  } else {
    bool saved = exit_code == EVEN_SAVED_AND_ENDED && job->cause[0] == '\0';
    even_text_add(text, exit_code == 0 ? "ended well" : saved ? "was saved and has ended" : "failed");
  }
}

static void tell_outcome(running_job *job, int exit_code, double seconds) {
  even_text text = EVEN_TEXT_EMPTY;
  if (job->options->json) {
    print_outcome(job, exit_code, seconds);
  }
  if (!job->options->quiet) {
    even_text_format(&text, "%s ", job->setup.run_name.data);
    add_outcome(&text, job, exit_code);
    even_text_format(&text, " after %.1f s; logs in %s/logs", seconds, job->setup.run_folder.data);
    even_job_view_notice(&job->view, even_text_string(&text));
    even_text_free(&text);
  }
}

enum { TIMELINE_CALLS = 20000, TIMELINE_RECORDS = 1 << 16 };

/* Of each rank, one by one; 0: none. */
static long long calls_kept(const even_job_options *options) {
  const char *asked = getenv("EVENSTEP_TIMELINE");
  if (options->timeline_calls > 0) {
    return options->timeline_calls;
  }
  bool named = asked != NULL && asked[0] != '\0' && strcmp(asked, "0") != 0 && !options->no_monitor;
  return options->timeline || named ? TIMELINE_CALLS : 0;
}

/* A rank each. */
static void fill_facts(const even_job_setup *setup, even_monitor_rank *facts, const char **gpus) {
  for (size_t i = 0; i < even_job_ranks_known(setup); i++) {
    const even_device *device = &setup->devices.items[i];
    gpus[i] = device->uuid;
    facts[i] = (even_monitor_rank){.device = device->name,
                                   .model = device->model,
                                   .host = setup->labels == NULL ? NULL : setup->labels[i],
                                   .cores = device->cores,
                                   .quota = setup->quota == NULL ? (double)NAN : setup->quota[i]};
    if (setup->quota != NULL && isfinite(setup->quota[i])) {
      facts[i].cores *= setup->quota[i];
    }
  }
}

static even_status open_monitor_with(running_job *job, const even_monitor_rank *facts, const char *const *gpus,
                                     const char *command) {
  const even_job_setup *setup = &job->setup;
  const even_monitor_params params = {.size = sizeof params,
                                      .run_folder = setup->run_folder.data,
                                      .run_name = setup->run_name.data,
                                      .command = command,
                                      .policy = job->options->policy,
                                      .ranks = (int)even_job_ranks_known(setup),
                                      .rank_facts = facts,
                                      .telemetry_fd = job->telemetry_fd,
                                      .port = (int)job->options->port,
                                      .step_rows = job->options->whole_history ? -1 : 0,
                                      .loss_spike = setup->loss_spike,
                                      .limits = setup->watches,
                                      .calls = calls_kept(job->options),
                                      .continues = even_outlast_due(job->options->legacy),
                                      .notice = on_notice,
                                      .notice_context = job,
                                      .gpus = gpus};
  return even_monitor_open(&params, &job->monitor);
}

static even_status open_monitor(running_job *job) {
  even_monitor_rank *facts = NULL;
  const char **gpus = NULL;
  even_text command = EVEN_TEXT_EMPTY;
  size_t records = calls_kept(job->options) > 0 ? TIMELINE_RECORDS : 0;
  /* and those of ranks that may join, or be back, or whose places take part again */
  size_t rings = job->setup.devices.count + even_hosts_absent_ranks(job->setup.hosts) + job->setup.aside.count;
  rings = (size_t)job->options->max_ranks > rings ? (size_t)job->options->max_ranks : rings;
  if (even_adopt_due(job->setup.hosts)) { /* the ranks that run write where they did */
    job->telemetry_fd = even_adopt_telemetry(job->setup.hosts);
  } else if (even_outlast_due(job->options->legacy)) {
    job->telemetry_fd = even_outlast_telemetry(job->options->legacy);
  } else {
    EVEN_TRY(even_telemetry_create_segment((int)rings, records, &job->telemetry_fd));
  }
  if (job->options->no_monitor) {
    return EVEN_OK; /* the agent alone reads it */
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&facts, job->setup.devices.count));
  even_status status = EVEN_NEW_ARRAY(&gpus, job->setup.devices.count);
  status = status == EVEN_OK ? even_process_add_command(getpid(), &command) : status;
  if (status == EVEN_OK) {
    fill_facts(&job->setup, facts, gpus);
    status = open_monitor_with(job, facts, gpus, even_text_string(&command));
  }
  even_text_free(&command);
  even_free((void *)gpus);
  even_free(facts);
  if (status != EVEN_OK) {
    (void)even_error_fix("--no-monitor runs without page and history");
    return status;
  }
  (void)snprintf(job->url, sizeof job->url, "%s", even_monitor_url(job->monitor));
  if (!job->options->quiet && job->url[0] != '\0') {
    char words[sizeof job->url + 16];
    (void)snprintf(words, sizeof words, "watch it at %s", job->url);
    even_job_view_notice(&job->view, words);
  }
  return EVEN_OK;
}

static even_status end_monitor(running_job *job, int exit_code) {
  /* the last look may be seconds old */
  even_status held = job->monitor == NULL ? EVEN_OK : even_lease_ask(job->setup.lease);
  if (held == EVEN_OK) {
    return even_monitor_close(job->monitor, exit_code);
  }
  even_monitor_leave(job->monitor);
  return held;
}

/* A history that cannot be finished is told; the script's exit code stands. */
static void close_monitor(running_job *job, int exit_code) {
  if (job->monitor != NULL && end_monitor(job, exit_code) != EVEN_OK) {
    even_job_view_notice(&job->view, even_error_last()->what);
  }
  job->monitor = NULL;
}

static bool user_asks(void) {
  return even_signals_end_pending() != 0;
}

/* The exit code of a job that an error of its own ended; a signal that came while it was set up ends it as such. */
static int code_of(even_status status) {
  return status == EVEN_ERR_INTERRUPTED && user_asks() ? 128 + even_signals_end_pending()
                                                       : even_status_exit_code(status);
}

static void tell_what_a_profile_lacks(running_job *job) {
  const even_job_options *options = job->options;
  int rank = job->setup.no_score;
  if (rank < 0 || options->quiet) {
    return;
  }
  const char *host = job->setup.labels != NULL ? job->setup.labels[rank] : NULL;
  even_text text = EVEN_TEXT_EMPTY;
  even_text_format(&text,
                   "%s%s%s has no score that holds for %s (none, one of another model, %s): the shares do not "
                   "start from it; `evenstep profile` measures anew",
                   even_job_profile_path(options), host != NULL ? " of host " : "", host != NULL ? host : "",
                   job->setup.devices.items[rank].name,
                   job->setup.labels != NULL
                       ? "a disturbed one, or one that was not measured as another host's, in C or by torch"
                       : "or a disturbed one");
  even_job_view_notice(&job->view, even_text_string(&text));
  even_text_free(&text);
}

/* This one never measures. */
static void tell_what_proportional_lacks(running_job *job) {
  const even_job_setup *setup = &job->setup;
  even_policy policy;
  if (job->options->quiet || setup->speeds != NULL || setup->devices.count - setup->spares < 2 ||
      even_policy_parse(job->options->policy, &policy) != EVEN_OK || policy != EVEN_POLICY_PROPORTIONAL) {
    return;
  }
  even_text text = EVEN_TEXT_EMPTY;
  even_text_format(&text, "--policy proportional shares by a profile, and %s: shares are equal, and stay so; %s",
                   setup->no_score >= 0 ? "none tells of all devices" : "there is none",
                   setup->hosts != NULL
                       ? "`evenstep profile` on each host makes one, and --policy auto measures while it trains"
                       : "`evenstep profile` makes one, and --policy auto measures while it trains");
  even_job_view_notice(&job->view, even_text_string(&text));
  even_text_free(&text);
}

static void tell_hosts(running_job *job) {
  even_text text = EVEN_TEXT_EMPTY;
  if (job->setup.hosts == NULL || job->options->quiet) {
    return;
  }
  even_job_name_hosts(&job->setup, &text);
  even_job_view_notice(&job->view, even_text_string(&text));
  even_text_free(&text);
}

static even_status follow_monitor(running_job *job) {
  even_monitor_rank *facts = NULL;
  const char **gpus = NULL;
  size_t count = even_job_ranks_known(&job->setup);
  if (job->monitor == NULL) {
    return EVEN_OK;
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&facts, count));
  even_status status = EVEN_NEW_ARRAY(&gpus, count);
  if (status == EVEN_OK) {
    fill_facts(&job->setup, facts, gpus);
    status = even_monitor_ranks(job->monitor, (int)count, facts, gpus);
  }
  even_free((void *)gpus);
  even_free(facts);
  return status;
}

/* The job's hosts are others now. */
static even_status follow_hosts(running_job *job) {
  even_status status = even_job_setup_follow(job->options, &job->setup);
  /* also after a failure: what was shown by is freed */
  even_job_view_ranks(&job->view, job->setup.shown, job->setup.labels, (int)job->setup.devices.count);
  EVEN_TRY(status);
  EVEN_TRY(follow_monitor(job));
  tell_hosts(job);
  return EVEN_OK;
}

/* Other places take part. */
static even_status follow_places(running_job *job) {
  job->setup.aside.changed = false;
  if (job->setup.hosts != NULL) {
    return follow_hosts(job); /* whose lists are cut */
  }
  even_status status = even_job_setup_without(job->options, &job->setup.aside, &job->all, &job->setup);
  /* also after a failure: what was shown by is freed */
  even_job_view_ranks(&job->view, job->setup.shown, job->setup.labels, (int)job->setup.devices.count);
  return status == EVEN_OK ? follow_monitor(job) : status;
}

static even_status run_on(running_job *job, int *exit_code) {
  even_status status = run(job, exit_code);
  while (status == EVEN_OK && (even_hosts_changed(job->setup.hosts) || job->setup.aside.changed)) {
    EVEN_TRY(job->setup.aside.changed ? follow_places(job) : follow_hosts(job));
    status = run(job, exit_code);
  }
  return status;
}

static void tell_where(running_job *job) {
  char words[192];
  char where[96];
  if (job->options->max_ranks == 0 || job->options->quiet) {
    return;
  }
  even_hosts_where(job->setup.hosts, where, sizeof where);
  (void)snprintf(words, sizeof words, "hosts join at %s (evenstep join), up to %lld ranks", where,
                 (long long)job->options->max_ranks);
  even_job_view_notice(&job->view, words);
}

static even_status open_and_run(running_job *job, int *exit_code) {
  uint64_t started = job->options->legacy != NULL ? job->options->legacy->since_ns : even_clock_ns();
  even_status status = open_monitor(job);
  even_error first = *even_error_last();
  if (status == EVEN_OK) {
    if (job->monitor != NULL && !job->options->quiet && !job->options->json) {
      even_job_view_live(&job->view, on_live, job);
    }
    status = run_on(job, exit_code);
    first = *even_error_last();
    even_job_view_settle(&job->view);
  }
  if (status == EVEN_OK) {
    close_monitor(job, *exit_code);
  } else {
    (void)!end_monitor(job, code_of(status));
    (void)even_error_restore(&first); /* why the job failed is the news */
  }
  even_pipe_close(job->telemetry_fd);
  if (status == EVEN_OK) {
    tell_outcome(job, *exit_code, (double)(even_clock_ns() - started) * 1e-9);
  }
  return status;
}

static even_status open_setup(running_job *job, char *const *environment, size_t count, char **words) {
  EVEN_TRY(even_job_setup_open(job->options, environment, count, words, &job->setup));
  even_status status = even_job_keep_aside(job->options, &job->all, &job->setup);
  if (status != EVEN_OK) {
    const even_error kept = *even_error_last();
    even_job_setup_whole(&job->all, &job->setup);
    even_job_setup_close(&job->setup);
    (void)even_error_restore(&kept);
  }
  return status;
}

int even_job_start(const even_job_options *options, char *const *environment, size_t count, char **words) {
  running_job job;
  int exit_code = 0;
  bool reader_paused = false;
  memset(&job, 0, sizeof job);
  job.options = options;
  job.telemetry_fd = -1;
  even_status status = even_signals_block(); /* before the GPU driver or the monitor starts threads */
  even_stop_when(user_asks);
  if (status == EVEN_OK) {
    status = open_setup(&job, environment, count, words);
  }
  if (status == EVEN_OK && options->legacy != NULL) {
    even_legacy_name(options->legacy, even_text_string(&job.setup.run_name));
  }
  if (status == EVEN_OK) {
    status = even_job_view_open(&job.view, options->quiet, options->json, job.setup.shown, (int)job.setup.devices.count,
                                job.setup.run_folder.data);
    if (status == EVEN_OK) {
      job.view.labels = job.setup.labels;
      tell_what_a_profile_lacks(&job);
      tell_what_proportional_lacks(&job);
      tell_hosts(&job);
      even_job_tell_aside(&job.setup.aside, &job.view);
      tell_where(&job);
      status = open_and_run(&job, &exit_code);
    }
    reader_paused = !even_job_view_close(&job.view);
    even_job_setup_whole(&job.all, &job.setup);
    even_job_setup_close(&job.setup);
  }
  even_stop_when(NULL);
  if (status != EVEN_OK) {
    if (!reader_paused) {
      (void)even_cli_fail_of(status);
    }
    exit_code = code_of(status);
  }
  return exit_code;
}
