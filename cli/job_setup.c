/* Options to a job: devices, quotas, speeds, environment; every wrong value named with its fix. */
#include "cli/job_setup.h"
#include "cli/job_aside.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "checkpoint/reader.h"
#include "cli/job_fetch.h"
#include "monitor/monitor.h"
#include "orchestrator/estate.h"
#include "orchestrator/host_memory.h"
#include "orchestrator/outlast.h"
#include "os/path.h"

#include <errno.h>
#include <evenstep/balancer.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_RANKS = 4096 };

static even_status read_ranks(const char *text, int *out) {
  char *end = NULL;
  *out = 0;
  if (text == NULL || strcmp(text, "auto") == 0) {
    return EVEN_OK;
  }
  errno = 0;
  long value = strtol(text, &end, 10);
  if (errno != 0 || end == text || *end != '\0' || value < 1 || value > MOST_RANKS) {
    even_status status = even_fail(EVEN_ERR_USAGE, "-n %s is no number of ranks", text);
    (void)even_error_fix("give a number from 1 to %d, or auto", MOST_RANKS);
    return status;
  }
  *out = (int)value;
  return EVEN_OK;
}

/* "100" (steps) or "30s" */
static even_status check_every(const char *option, const char *text) {
  char *end = NULL;
  double value = strtod(text, &end);
  bool seconds = end != text && strcmp(end, "s") == 0;
  if (end == text || !isfinite(value) || value <= 0 || (!seconds && (*end != '\0' || floor(value) < value))) {
    even_status status = even_fail(EVEN_ERR_USAGE, "%s %s is no interval", option, text);
    (void)even_error_fix("give steps (100) or seconds (30s)");
    return status;
  }
  return EVEN_OK;
}

static even_status bad_quota(const char *text, const char *why) {
  even_status status = even_fail(EVEN_ERR_USAGE, "--cpu-quota %s: %s", text, why);
  (void)even_error_fix("give RANK:FRACTION,… with fractions above 0, at most 1: --cpu-quota 1:0.25");
  return status;
}

/* With another agent's job, which knew all of its hosts: some of them may be missing now. */
static bool goes_on(const even_job_options *options) {
  return options->estate != NULL || (options->legacy != NULL && even_legacy_is_left(options->legacy));
}

/* left: fewer ranks may be there than it was written for. */
static even_status read_quota(const char *text, size_t ranks, bool left, double *quota) {
  const char *at = text;
  for (size_t i = 0; i < ranks; i++) {
    quota[i] = (double)NAN;
  }
  for (;;) {
    char *end = NULL;
    errno = 0;
    long rank = strtol(at, &end, 10);
    if (errno != 0 || end == at || *end != ':') {
      return bad_quota(text, "not RANK:FRACTION");
    }
    bool there = rank >= 0 && (size_t)rank < ranks;
    if (!there && !left) {
      return bad_quota(text, "there is no such rank");
    }
    at = end + 1;
    double fraction = strtod(at, &end);
    if (end == at || !(fraction > 0 && fraction <= 1) || (*end != '\0' && *end != ',')) {
      return bad_quota(text, "not a fraction");
    }
    if (there) {
      quota[rank] = fraction;
    }
    if (*end == '\0') {
      return EVEN_OK;
    }
    at = end + 1;
  }
}

/* `left`: there were more ranks once, and those that are gone are left out. */
static even_status read_shown(const char *text, size_t ranks, bool left, bool *shown) {
  const char *at = text;
  bool all = strcmp(text, "all") == 0;
  for (size_t i = 0; i < ranks; i++) {
    shown[i] = all;
  }
  if (all || strcmp(text, "none") == 0) {
    return EVEN_OK;
  }
  for (;;) {
    char *end = NULL;
    long rank = strtol(at, &end, 10);
    bool there = rank >= 0 && (size_t)rank < ranks;
    if (end == at || (*end != '\0' && *end != ',') || (!there && !left)) {
      even_status status = even_fail(EVEN_ERR_USAGE, "--log-rank %s names no rank of this job", text);
      (void)even_error_fix("give all, none, or ranks from 0 to %zu: 0,2", ranks - 1);
      return status;
    }
    if (there) {
      shown[rank] = true;
    }
    if (*end == '\0') {
      return EVEN_OK;
    }
    at = end + 1;
  }
}

static even_status build_environment(const even_job_options *options, char *const *extra, even_job_setup *setup) {
  char keep[24];
  (void)snprintf(keep, sizeof keep, "%lld", (long long)options->keep);
  EVEN_TRY(even_environment_set(&setup->environment, "EVENSTEP_POLICY", options->policy));
  EVEN_TRY(even_environment_set(&setup->environment, "EVENSTEP_CHECKPOINT_DIR", setup->checkpoint_folder.data));
  EVEN_TRY(even_environment_set(&setup->environment, "EVENSTEP_CHECKPOINT_KEEP", keep));
  EVEN_TRY(even_job_set_sign(setup));
  if (options->checkpoint_every != NULL) {
    EVEN_TRY(even_environment_set(&setup->environment, "EVENSTEP_CHECKPOINT_EVERY", options->checkpoint_every));
  }
  if (options->checkpoint_memory > 0) {
    char steps[24];
    (void)snprintf(steps, sizeof steps, "%lld", (long long)options->checkpoint_memory);
    EVEN_TRY(even_environment_set(&setup->environment, "EVENSTEP_CHECKPOINT_MEMORY_EVERY", steps));
  }
  if (options->keep_every != NULL) {
    EVEN_TRY(even_environment_set(&setup->environment, "EVENSTEP_CHECKPOINT_KEEP_EVERY", options->keep_every));
  }
  if (options->checkpoint_to != NULL && options->checkpoint_to[0] != '\0') {
    EVEN_TRY(even_environment_set(&setup->environment, "EVENSTEP_CHECKPOINT_TO", options->checkpoint_to));
  }
  if (setup->speeds != NULL) {
    EVEN_TRY(even_job_set_speeds(setup, setup->devices.count - setup->spares));
  }
  for (size_t i = 0; extra != NULL && extra[i] != NULL; i++) {
    EVEN_TRY(even_environment_put(&setup->environment, extra[i]));
  }
  return EVEN_OK;
}

static even_status set_checkpoint_folder(const even_job_options *options, even_job_setup *setup) {
  if (options->checkpoint_folder != NULL) {
    return even_path_absolute(options->checkpoint_folder, &setup->checkpoint_folder);
  }
  EVEN_TRY(even_path_absolute(setup->run_folder.data, &setup->checkpoint_folder));
  even_text_add(&setup->checkpoint_folder, "/checkpoints");
  return even_text_status(&setup->checkpoint_folder);
}

/* Every byte is read before anything is made: a damage that only the ranks found would end the job the same way, later,
 * with the run folder already in use. */
static even_status check_resume(const char *path) {
  even_status status = even_checkpoint_verify(path, NULL);
  if (status != EVEN_OK) {
    (void)even_error_prefix("--resume");
    (void)even_error_fix("`evenstep ckpt ls` lists the checkpoints of a run; --resume auto takes the newest whole one");
  }
  return status;
}

/* Found out by the first checkpoint otherwise, after all the work before it. */
static even_status check_checkpoint_folder(const char *path) {
  if (even_path_is_url(path)) {
    (void)even_fail(EVEN_ERR_USAGE, "--checkpoint-dir names a place to upload to, and no folder of this host");
    return even_error_fix("name a folder, or leave it out; --checkpoint-to URL uploads each checkpoint, too");
  }
  if (even_path_exists(path) && !even_path_is_folder(path)) {
    even_status status = even_fail(EVEN_ERR_IN_USE, "--checkpoint-dir %s is no folder", path);
    (void)even_error_fix("name a folder, or one that is not there yet");
    return status;
  }
  return EVEN_OK;
}

static even_status check_options(const even_job_options *options) {
  even_policy policy;
  double fetch_seconds = 0;
  if (options->no_monitor && options->port != 0) {
    (void)even_fail(EVEN_ERR_USAGE, "--port %lld is the port of a page, and --no-monitor says that there is none",
                    (long long)options->port);
    return even_error_fix("leave out one of the two");
  }
  if (options->no_monitor && (options->timeline || options->timeline_calls > 0)) {
    (void)even_fail(EVEN_ERR_USAGE, "--timeline is kept in the history, and --no-monitor says that there is none");
    return even_error_fix("leave out one of the two");
  }
  if (options->no_monitor && options->whole_history) {
    (void)even_fail(EVEN_ERR_USAGE, "--whole-history keeps every step, and --no-monitor says that none is recorded");
    return even_error_fix("leave out one of the two");
  }
  if (options->memory_copies >= 0 && options->checkpoint_memory == 0) {
    (void)even_fail(EVEN_ERR_USAGE, "--memory-copies %lld is of --checkpoint-memory",
                    (long long)options->memory_copies);
    return even_error_fix("say every how many steps a checkpoint is kept in memory: --checkpoint-memory 10");
  }
  EVEN_TRY(even_job_check_aside(options));
  EVEN_TRY(even_job_check_name(options));
  EVEN_TRY(even_job_fetch_limit(&fetch_seconds));
  EVEN_TRY(even_policy_parse(options->policy, &policy));
  if (options->checkpoint_every != NULL) {
    EVEN_TRY(check_every("--checkpoint-every", options->checkpoint_every));
  }
  if (options->keep_every != NULL) {
    EVEN_TRY(check_every("--keep-every", options->keep_every));
  }
  if (options->checkpoint_folder != NULL) {
    EVEN_TRY(check_checkpoint_folder(options->checkpoint_folder));
  }
  bool left = options->legacy != NULL && even_legacy_is_left(options->legacy); /* was read, and may be gone since */
  if (options->resume != NULL && strcmp(options->resume, "auto") != 0 && !even_path_is_url(options->resume) && !left) {
    EVEN_TRY(check_resume(options->resume));
  }
  return EVEN_OK;
}

/* A word for the ranks, from the option or the variable, checked here; what the variable says they have anyway. */
static even_status put_word(const char *option, const char *name, const char *variable, const char *const *words,
                            even_job_setup *setup) {
  const char *from = NULL;
  const char *value = even_job_given(option, name, variable, &from);
  for (size_t i = 0; value != NULL && words[i] != NULL; i++) {
    if (strcmp(value, words[i]) == 0) {
      return option == NULL ? EVEN_OK : even_environment_set(&setup->environment, variable, value);
    }
  }
  if (value == NULL) {
    return EVEN_OK;
  }
  (void)even_fail(EVEN_ERR_USAGE, "%s %s is none of the words that it takes", from, value);
  return words[2] == NULL ? even_error_fix("give %s or %s", words[0], words[1])
                          : even_error_fix("give %s, %s or %s", words[0], words[1], words[2]);
}

static even_status put_steps(const char *option, even_job_setup *setup) {
  const char *from = NULL;
  char *end = NULL;
  const char *value = even_job_given(option, "--check-parameters", "EVENSTEP_CHECK_PARAMETERS", &from);
  if (value == NULL) {
    return EVEN_OK;
  }
  long steps = strtol(value, &end, 10);
  if (strcmp(value, "off") != 0 && (end == value || *end != '\0' || steps < 0 || steps > INT32_MAX)) {
    (void)even_fail(EVEN_ERR_USAGE, "%s %s is no number of steps", from, value);
    return even_error_fix("give steps (100), or off");
  }
  return option == NULL ? EVEN_OK : even_environment_set(&setup->environment, "EVENSTEP_CHECK_PARAMETERS", value);
}

/* "64:1024,lr=sqrt", and maybe ",every=100" or ",every=epoch"; the ranks check the same once more. */
static bool is_batch_rule(const char *text) {
  static const char *const rules[] = {"linear", "sqrt", "adascale", "none"};
  char *end = NULL;
  char rule[16] = "";
  char every[16] = "1";
  long least = strtol(text, &end, 10);
  if (end == text || *end != ':' || least < 1) {
    return false;
  }
  const char *at = end + 1;
  long most = strtol(at, &end, 10);
  int read = 0;
  if (end == at || most < least || (sscanf(end, ",lr=%15[a-z]%n,every=%15[0-9a-z]%n", rule, &read, every, &read) < 1) ||
      end[read] != '\0') {
    return false;
  }
  bool known = false;
  for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
    known = known || strcmp(rule, rules[i]) == 0;
  }
  long steps = strtol(every, &end, 10);
  return known && (strcmp(every, "epoch") == 0 || (*end == '\0' && steps >= 1));
}

static even_status put_batch(const char *option, even_job_setup *setup) {
  const char *from = NULL;
  const char *value = even_job_given(option, "--batch-adapt", "EVENSTEP_BATCH_ADAPT", &from);
  if (value == NULL) {
    return EVEN_OK;
  }
  if (!is_batch_rule(value)) {
    (void)even_fail(EVEN_ERR_USAGE, "%s %s does not say between what, and by which learning-rate rule", from, value);
    return even_error_fix("give bounds and linear, sqrt, adascale or none: 64:1024,lr=sqrt,every=100");
  }
  return option == NULL ? EVEN_OK : even_environment_set(&setup->environment, "EVENSTEP_BATCH_ADAPT", value);
}

static even_status read_watch(const even_job_options *options, even_job_setup *setup) {
  static const char *const of_nonfinite[] = {"report", "skip", "stop", NULL};
  static const char *const of_difference[] = {"report", "stop", NULL};
  EVEN_TRY(put_word(options->on_nonfinite, "--on-nonfinite", "EVENSTEP_ON_NONFINITE", of_nonfinite, setup));
  EVEN_TRY(put_word(options->on_difference, "--on-difference", "EVENSTEP_ON_DIFFERENCE", of_difference, setup));
  EVEN_TRY(put_batch(options->batch_adapt, setup));
  return put_steps(options->check_parameters, setup);
}

static even_status read_recovery(const even_job_options *options, even_job_setup *setup) {
  setup->replace = strcmp(options->recovery, "replace") == 0;
  setup->shrink = setup->replace || strcmp(options->recovery, "shrink") == 0;
  if (!setup->shrink && strcmp(options->recovery, "restart") != 0) {
    even_status status = even_fail(EVEN_ERR_USAGE, "--recovery %s is no way to go on", options->recovery);
    (void)even_error_fix("choose restart, shrink or replace");
    return status;
  }
  if (!setup->shrink && options->min_ranks > 1 && setup->hosts == NULL) {
    even_status status =
        even_fail(EVEN_ERR_USAGE, "--min-ranks is of --recovery shrink and replace, and of several hosts");
    (void)even_error_fix("give both, or neither");
    return status;
  }
  if (!setup->replace && setup->spares > 0) {
    even_status status = even_fail(EVEN_ERR_USAGE, "--spares is of --recovery replace");
    (void)even_error_fix("give both, or neither");
    return status;
  }
  if (!goes_on(options) && options->min_ranks > (int64_t)setup->devices.count) {
    even_status status = even_fail(EVEN_ERR_USAGE, "--min-ranks %lld is more than the %zu ranks of the job",
                                   (long long)options->min_ranks, setup->devices.count);
    (void)even_error_fix("give at most as many as there are ranks");
    return status;
  }
  return EVEN_OK;
}

/* As many as started it, or fewer, may be too many to join. */
static even_status check_most(const even_job_options *options, const even_job_setup *setup) {
  if (options->max_ranks == 0 || options->max_ranks >= (int64_t)setup->devices.count) {
    return EVEN_OK;
  }
  (void)even_fail(EVEN_ERR_USAGE, "--max-ranks %lld is fewer than the %zu ranks of the job",
                  (long long)options->max_ranks, setup->devices.count);
  return even_error_fix("give at least as many as there are ranks");
}

/* That of the host that takes a leader's place has what was sent there. */
static even_status open_memory(const even_job_options *options, even_job_setup *setup) {
  if (options->checkpoint_memory == 0) {
    return EVEN_OK;
  }
  if (options->estate != NULL && options->estate->memory != NULL) {
    setup->memory = options->estate->memory;
    options->estate->memory = NULL;
    return EVEN_OK;
  }
  return even_outlast_due(options->legacy) ? even_outlast_memory(options->legacy, &setup->memory)
                                           : even_host_memory_open(&setup->memory);
}

static even_status open_setup(const even_job_options *options, char *const *environment, size_t count, char **words,
                              even_job_setup *setup) {
  int ranks = 0;
  int first = 0;
  EVEN_TRY(read_ranks(options->ranks, &ranks));
  EVEN_TRY(check_options(options));
  EVEN_TRY(even_job_command(options, count, words, setup));
  EVEN_TRY(even_job_first_host(options, ranks, &first));
  EVEN_TRY(even_device_select(options->devices, first, &setup->devices));
  EVEN_TRY(even_job_reach_hosts(options, ranks, count, words, setup));
  EVEN_TRY(even_job_read_spares(options, goes_on(options), setup));
  EVEN_TRY(read_recovery(options, setup));
  EVEN_TRY(check_most(options, setup));
  even_job_keep_places(options, setup);
  size_t places = setup->devices.count + setup->spares;
  EVEN_TRY(EVEN_NEW_ARRAY(&setup->shown, places));
  EVEN_TRY(read_shown(options->log_rank, places, goes_on(options), setup->shown));
  if (options->estate != NULL) {
    EVEN_TRY(even_job_inherit_quota(options->estate, places, setup));
  } else if (options->cpu_quota != NULL) {
    EVEN_TRY(EVEN_NEW_ARRAY(&setup->quota, places));
    EVEN_TRY(read_quota(options->cpu_quota, places, goes_on(options), setup->quota));
  }
  bool begins = options->estate == NULL && !even_outlast_due(options->legacy);
  EVEN_TRY(even_job_read_speeds(options, begins, setup));
  EVEN_TRY(even_job_add_spares(setup));
  EVEN_TRY(even_job_watching(options, setup));
  EVEN_TRY(read_watch(options, setup));
  setup->max_restarts = options->max_restarts < 0 ? 3 : (int)options->max_restarts;
  setup->restart_always = options->max_restarts >= 0;
  if (options->port != 0 && !even_outlast_due(options->legacy)) { /* before a folder is made that would hold nothing */
    EVEN_TRY(even_monitor_check_port((int)options->port));
  }
  EVEN_TRY(even_job_run_folder(options, words[0], setup));
  EVEN_TRY(set_checkpoint_folder(options, setup));
  EVEN_TRY(open_memory(options, setup));
  return build_environment(options, environment, setup);
}

even_status even_job_setup_open(const even_job_options *options, char *const *environment, size_t count, char **words,
                                even_job_setup *out) {
  memset(out, 0, sizeof *out);
  out->lock = -1;
  out->no_score = -1;
  even_status status = open_setup(options, environment, count, words, out);
  if (status != EVEN_OK) {
    even_job_setup_close(out);
  }
  return status;
}

/* Of ranks by their hosts, and their numbers there: those that are new have none. */
static even_status follow_quota(const even_job_setup *before, even_job_setup *setup) {
  size_t count = setup->devices.count;
  setup->quota = NULL;
  if (before->quota == NULL) {
    return EVEN_OK;
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&setup->quota, count));
  for (size_t i = 0; i < count; i++) {
    const char *host = setup->labels[i];
    size_t first = i;
    setup->quota[i] = i < setup->local && i < before->local ? before->quota[i] : (double)NAN;
    while (host != NULL && first > 0 && setup->labels[first - 1] != NULL &&
           strcmp(setup->labels[first - 1], host) == 0) {
      first--;
    }
    size_t old = before->local;
    while (host != NULL && old < before->devices.count && strcmp(before->labels[old], host) != 0) {
      old++;
    }
    old += i - first;
    if (host != NULL && old < before->devices.count && strcmp(before->labels[old], host) == 0) {
      setup->quota[i] = before->quota[old];
    }
  }
  return EVEN_OK;
}

/* Numbers that --log-rank names and that are none now are left out. */
static even_status follow_shown(const even_job_options *options, size_t most, even_job_setup *setup) {
  size_t room = most > setup->devices.count ? most : setup->devices.count;
  even_free(setup->shown);
  setup->shown = NULL;
  EVEN_TRY(EVEN_NEW_ARRAY(&setup->shown, room));
  return read_shown(options->log_rank, room, options->estate != NULL, setup->shown);
}

/* This host has other ranks than before. */
static void follow_own(even_job_setup *setup) {
  even_device_list own;
  setup->devices.count = setup->local; /* those behind own no memory */
  if (even_hosts_own_devices(setup->hosts, &own)) {
    even_device_list_free(&setup->devices);
    setup->devices = own;
    setup->local = own.count;
  }
}

even_status even_job_setup_follow(const even_job_options *options, even_job_setup *setup) {
  even_job_drop_spares(setup);
  const even_job_setup before = *setup;
  memmove(setup->devices.items, setup->devices.items + setup->first, setup->local * sizeof *setup->devices.items);
  follow_own(setup);
  setup->labels = NULL;
  setup->names = NULL;
  setup->most = before.most > before.devices.count ? before.most : before.devices.count;
  even_status status = even_job_add_devices(setup);
  if (status == EVEN_OK) {
    status = follow_quota(&before, setup);
  }
  even_free((void *)before.labels);
  even_free(before.names);
  if (status != EVEN_OK || setup->quota != before.quota) {
    even_free(before.quota);
  }
  EVEN_TRY(status);
  EVEN_TRY(even_job_read_spares(options, true, setup));
  even_job_keep_places(options, setup);
  size_t places = setup->devices.count + setup->spares;
  EVEN_TRY(follow_shown(options, setup->most > places ? setup->most : places, setup));
  even_free(setup->speeds);
  setup->speeds = NULL;
  EVEN_TRY(even_job_read_speeds(options, false, setup));
  EVEN_TRY(setup->speeds != NULL ? even_job_set_speeds(setup, setup->devices.count)
                                 : even_environment_set(&setup->environment, "EVENSTEP_SPEEDS", ""));
  EVEN_TRY(even_job_add_spares(setup));
  if (setup->quota != NULL && setup->spares > 0) {
    EVEN_TRY(even_realloc((void **)&setup->quota, setup->devices.count, sizeof *setup->quota));
    for (size_t i = setup->devices.count - setup->spares; i < setup->devices.count; i++) {
      setup->quota[i] = (double)NAN;
    }
  }
  return EVEN_OK;
}

void even_job_setup_close(even_job_setup *setup) {
  even_hosts_close(setup->hosts);
  even_host_memory_close(setup->memory);
  even_job_way_free(&setup->way);
  even_free((void *)setup->labels);
  even_free(setup->names);
  even_free(setup->spare_hosts);
  even_job_leave_folder(setup);
  even_aside_close(&setup->aside);
  even_device_list_free(&setup->devices);
  even_free(setup->quota);
  even_free(setup->speeds);
  even_free(setup->shown);
  even_free((void *)setup->command);
  even_text_free(&setup->python);
  even_text_free(&setup->run_name);
  even_text_free(&setup->run_folder);
  even_text_free(&setup->checkpoint_folder);
  even_environment_free(&setup->environment);
  memset(setup, 0, sizeof *setup);
  setup->lock = -1;
}
