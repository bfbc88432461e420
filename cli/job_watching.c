/* What a job is watched for, and how long is waited: hangs, stops, notice. */
#include "cli/job_setup.h"

#include "base/fail.h"
#include "orchestrator/notice_place.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double HANG_SECONDS = 30;

const char *even_job_given(const char *option, const char *option_name, const char *variable, const char **from) {
  const char *value = option != NULL ? option : getenv(variable);
  *from = option != NULL ? option_name : variable;
  return value == NULL || value[0] == '\0' ? NULL : value;
}

static even_status read_hangs(const even_job_options *options, even_job_setup *setup) {
  const char *from = NULL;
  char *end = NULL;
  const char *limit = even_job_given(options->hang_timeout, "--hang-timeout", "EVENSTEP_HANG_TIMEOUT", &from);
  setup->hang_seconds = limit == NULL ? HANG_SECONDS : strcmp(limit, "off") == 0 ? 0 : strtod(limit, &end);
  bool whole = end == NULL || (end != limit && (*end == '\0' || strcmp(end, "s") == 0));
  if (!whole || (end != NULL && !(setup->hang_seconds >= 0.5 && setup->hang_seconds <= 1e6))) {
    (void)even_fail(EVEN_ERR_USAGE, "%s %s is no time", from, limit);
    return even_error_fix("give seconds, from 0.5 on (30), or off");
  }
  const char *reaction = even_job_given(options->on_hang, "--on-hang", "EVENSTEP_ON_HANG", &from);
  setup->restart_hung = reaction != NULL && strcmp(reaction, "restart") == 0;
  if (reaction != NULL && !setup->restart_hung && strcmp(reaction, "report") != 0) {
    (void)even_fail(EVEN_ERR_USAGE, "%s %s is no reaction to a hang", from, reaction);
    return even_error_fix("give report or restart");
  }
  return EVEN_OK;
}

/* A number from `least` to `most`, of which `what` is said where it is none; 0 where none is given. */
static even_status read_number(const char *text, const char *from, double least, double most, const char *what,
                               const char *fix, double *out) {
  char *end = NULL;
  *out = text == NULL ? 0 : strtod(text, &end);
  if (text != NULL && (end == text || *end != '\0' || !(*out >= least && *out <= most))) {
    (void)even_fail(EVEN_ERR_USAGE, "%s %s is no %s", from, text, what);
    return even_error_fix("%s", fix);
  }
  return EVEN_OK;
}

/* Whoever is announced an end without its time, and has not said how long its ranks take. */
static const char ANNOUNCED_SECONDS[] = "30";

static even_status read_notice_from(const even_job_options *options, even_job_setup *setup) {
  const char *from = NULL;
  even_notice_place place = {.service = EVEN_NOTICE_OFF};
  const char *given = even_job_given(options->notice_from, "--notice-from", "EVENSTEP_NOTICE_FROM", &from);
  if (given != NULL && even_notice_place_read(given, &place) != EVEN_OK) {
    return even_error_prefix("%s", from);
  }
  setup->notice_from = place.service == EVEN_NOTICE_OFF ? NULL : given;
  const char *every = even_job_given(NULL, "", "EVENSTEP_NOTICE_EVERY", &from);
  return read_number(every, from, 0.05, 3600, "time", "give the seconds between two questions, from 0.05 to 3600 (2)",
                     &setup->notice_every_seconds);
}

static even_status read_notice(const even_job_options *options, even_job_setup *setup) {
  const char *from = NULL;
  char *end = NULL;
  EVEN_TRY(read_notice_from(options, setup));
  const char *given = even_job_given(options->notice, "--notice", "EVENSTEP_NOTICE", &from);
  const char *limit = given == NULL && setup->notice_from != NULL ? ANNOUNCED_SECONDS : given;
  setup->notice_seconds = limit == NULL ? 0 : strtod(limit, &end);
  bool whole = limit == NULL || (end != limit && (*end == '\0' || strcmp(end, "s") == 0));
  if (!whole || (limit != NULL && !(setup->notice_seconds > 0 && setup->notice_seconds <= 1e6))) {
    (void)even_fail(EVEN_ERR_USAGE, "%s %s is no time", from, limit);
    return even_error_fix("give seconds, fewer than the scheduler waits until it kills: --notice 60");
  }
  bool own = limit != NULL && (options->notice != NULL || given == NULL); /* else the ranks inherit it */
  return own ? even_environment_set(&setup->environment, "EVENSTEP_NOTICE", limit) : EVEN_OK;
}

/* After --recovery was read. */
static even_status read_stragglers(const even_job_options *options, even_job_setup *setup) {
  const char *from = NULL;
  const char *way = options->on_straggler;
  bool replace = way != NULL && strcmp(way, "replace") == 0;
  bool leave = way != NULL && strcmp(way, "leave") == 0;
  setup->on_straggler = replace ? EVEN_ON_STRAGGLER_REPLACE : leave ? EVEN_ON_STRAGGLER_LEAVE : EVEN_ON_STRAGGLER_KEEP;
  if (way != NULL && !replace && !leave && strcmp(way, "keep") != 0) {
    (void)even_fail(EVEN_ERR_USAGE, "--on-straggler %s is nothing to do with a slow rank", way);
    return even_error_fix("choose keep, replace or leave");
  }
  if (replace && !setup->replace) {
    (void)even_fail(
        EVEN_ERR_USAGE,
        "--on-straggler replace ends a slow rank for another process to take its place, and none can without "
        "--recovery replace: all would start again");
    return even_error_fix("add --recovery replace (and --spares N, so that one waits)");
  }
  if (leave && (!setup->shrink || setup->replace)) {
    (void)even_fail(EVEN_ERR_USAGE, "--on-straggler leave ends a slow rank for the others to go on without it, and %s",
                    setup->replace ? "with --recovery replace another process would take its place"
                                   : "without --recovery shrink they cannot: all would start again");
    return even_error_fix(setup->replace ? "choose --on-straggler replace, or --recovery shrink"
                                         : "add --recovery shrink");
  }
  double percent = 0;
  EVEN_TRY(read_number(options->straggler_gain, "--straggler-gain", 0.1, 99, "gain",
                       "give the percent of a step, from 0.1 to 99 (5)", &percent));
  setup->straggler_gain = percent / 100;
  EVEN_TRY(read_number(options->straggler_patience, "--straggler-patience", 1, 1e6, "time",
                       "give seconds, from 1 on (60)", &setup->straggler_seconds));
  if (!replace && !leave && (options->straggler_gain != NULL || options->straggler_patience != NULL)) {
    (void)even_fail(EVEN_ERR_USAGE, "%s is of --on-straggler replace and leave",
                    options->straggler_gain != NULL ? "--straggler-gain" : "--straggler-patience");
    return even_error_fix("say what becomes of a slow rank: --on-straggler replace or leave");
  }
  const char *pause = even_job_given(NULL, "", "EVENSTEP_STRAGGLER_PAUSE", &from);
  return read_number(pause, from, 1, 1e6, "time", "give the seconds between two slow ranks that are ended (600)",
                     &setup->straggler_pause_seconds);
}

/* The grace is the ranks', who read it themselves, too. */
static even_status read_stops(even_job_setup *setup) {
  const char *from = NULL;
  const char *limit = even_job_given(NULL, "", "EVENSTEP_STOP_GRACE", &from);
  EVEN_TRY(read_number(limit, from, 0, (double)INFINITY, "time",
                       "give the seconds after which calls of the others fail for a stopped rank (0.15), or inf: never",
                       &setup->stop_grace_seconds));
  limit = even_job_given(NULL, "", "EVENSTEP_STOP_PATIENCE", &from);
  return read_number(
      limit, from, 1e-9, 1e6, "time",
      "give the seconds that a stopped rank is waited for once calls of the others have failed for it (1)",
      &setup->stop_seconds);
}

static even_status read_spikes(const even_job_options *options, even_job_setup *setup) {
  const char *from = NULL;
  char *end = NULL;
  const char *limit = even_job_given(options->loss_spike, "--loss-spike", "EVENSTEP_LOSS_SPIKE", &from);
  bool off = limit != NULL && strcmp(limit, "off") == 0;
  setup->loss_spike = limit == NULL ? 0 : off ? (double)INFINITY : strtod(limit, &end);
  if (limit != NULL && !off &&
      (end == limit || *end != '\0' || !(setup->loss_spike >= 1 && setup->loss_spike <= 1e6))) {
    (void)even_fail(EVEN_ERR_USAGE, "%s %s is no limit for a loss that jumps", from, limit);
    return even_error_fix("give deviations above the median, from 1 on (10), or off");
  }
  return EVEN_OK;
}

/* A watch of what may become slow, as it is given. */
typedef struct slow_watch {
  const char *given;
  const char *from;
  double least; /* factor */
  double least_seconds;
  const char *fix;
} slow_watch;

/* "X[:SECONDS]" or "off"; zeros where nothing is given. */
static even_status read_slow_watch(const slow_watch *watch, double *factor, double *seconds) {
  char *end = NULL;
  const char *given = watch->given;
  *factor = given == NULL ? 0 : strcmp(given, "off") == 0 ? (double)INFINITY : strtod(given, &end);
  *seconds = 0;
  if (end == NULL) {
    return EVEN_OK;
  }
  bool fits = end != given && *factor >= watch->least && *factor <= 1000;
  if (fits && *end == ':') {
    const char *rest = end + 1;
    *seconds = strtod(rest, &end);
    fits = end != rest && *seconds >= watch->least_seconds && *seconds <= 1e5;
  }
  if (!fits || *end != '\0') {
    (void)even_fail(EVEN_ERR_USAGE, "%s %s is no limit for what is slow", watch->from, given);
    return even_error_fix("%s", watch->fix);
  }
  return EVEN_OK;
}

static even_status read_watches(const even_job_options *options, even_job_setup *setup) {
  even_monitor_limits *limits = &setup->watches;
  slow_watch ranks = {.least = 1.2, .least_seconds = 0.5};
  slow_watch links = {.least = 1.5, .least_seconds = 1};
  const char *from = NULL;
  ranks.given = even_job_given(options->straggler_watch, "--straggler-watch", "EVENSTEP_STRAGGLER_WATCH", &ranks.from);
  ranks.fix =
      "give how many times its usual time a rank may take, from 1.2 to 1000, and for how many seconds, from "
      "0.5 on: 1.5:2; or off";
  EVEN_TRY(read_slow_watch(&ranks, &limits->straggler_factor, &limits->straggler_seconds));
  links.given = even_job_given(options->link_watch, "--link-watch", "EVENSTEP_LINK_WATCH", &links.from);
  links.fix =
      "give how many times its usual time a transfer may take, from 1.5 to 1000, and for how many seconds, "
      "from 1 on: 3:3; or off";
  EVEN_TRY(read_slow_watch(&links, &limits->link_factor, &limits->link_seconds));
  const char *every = even_job_given(options->gpu_watch, "--gpu-watch", "EVENSTEP_GPU_WATCH", &from);
  if (every != NULL && strcmp(every, "off") == 0) {
    limits->gpu_seconds = (double)INFINITY;
    return EVEN_OK;
  }
  return read_number(every, from, 0.1, 3600, "time",
                     "give the seconds between two looks at GPUs, from 0.1 to 3600 (1), or off", &limits->gpu_seconds);
}

even_status even_job_watching(const even_job_options *options, even_job_setup *setup) {
  EVEN_TRY(read_hangs(options, setup));
  EVEN_TRY(read_watches(options, setup));
  EVEN_TRY(read_stops(setup));
  EVEN_TRY(read_stragglers(options, setup));
  EVEN_TRY(read_spikes(options, setup));
  return read_notice(options, setup);
}
