/* evenstep chaos: trains once undisturbed and once under injected faults, and compares what came out. */
#include "cli/chaos_command.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "os/clock.h"
#include "os/folder.h"
#include "os/path.h"

#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* EXIT_BROKEN: all went well with chaos itself, and the promise was not kept. */
enum { EXIT_BROKEN = 11, MOST_SPARES = 64 };

static const even_usage usage = {
    .command = "chaos",
    .synopsis = "evenstep chaos [options] script.py [arguments]",
    .description =
        "Trains twice: undisturbed, and while faults are injected (real ones: signals, busy neighbours, damaged\n"
        "checkpoints, bytes on the job's ports, a full disk, lack of memory). The disturbed run must come to its end, "
        "and to the same parameters\n"
        "as the other. The faults, their times and their victims come from a seed.",
    .epilogue =
        "kinds of faults:\n"
        "  kill        a rank is killed (SIGKILL)\n"
        "  stop        a rank is stopped (SIGSTOP), and let go 5 s later (--hold)\n"
        "  slow        a busy neighbour takes most of a rank's core for 5 s (--hold)\n"
        "  agent       the agent is killed, and the job started again with --resume auto (or --replace-leader,\n"
        "              --restart-agent); of --namespaces any host's, of another one alone, whose ranks train on\n"
        "  bit-flip    one bit of the newest checkpoint turns, and a rank is killed\n"
        "  torn-write  the newest checkpoint loses half of a file, and a rank is killed\n"
        "  garbage     random bytes come to the ports on which the job listens\n"
        "  full-disk   the disk of the run is full for 5 s (--hold; of one that has up to 1 GB free)\n"
        "  clock       the clock of the day of a rank, or of the agent, jumps by up to 48 hours\n"
        "  stolen-port a rank is killed, and the port at which the next attempt is to meet is taken\n"
        "  out-of-memory  a rank gets no more memory for 5 s (--hold; RLIMIT_AS)\n"
        "  nan         a gradient of a rank is NaN in one backward; the runs have --on-nonfinite stop\n"
        "  twin        a second process claims to be a rank, and must be refused\n"
        "  partition   the link of a host of --namespaces is cut for 8 s, of the one that leads, too\n"
        "  With --hosts here,there all but full-disk, clock, nan (this host's) and partition come to any host.\n"
        "\n"
        "exit codes:\n"
        "  0 the promise was kept; 11 it was not: other parameters, a failed or hanging run; else as of `evenstep "
        "run`\n"
        "\n"
        "examples:\n"
        "  evenstep chaos -n 2 --faults 5 train.py\n"
        "  evenstep chaos -n 2 --seed 7 --kinds kill,agent --policy auto --tolerance 1e-5 train.py\n"
        "  evenstep chaos -n 3 --recovery replace --spares 1 --kinds kill,stop --tolerance 1e-5 train.py\n"
        "  evenstep chaos --hosts here:2,there:2 --kinds kill,stop,agent train.py",
    .stop_at_operand = true,
};

static void add_more(even_chaos_command *on, const char *option, const char *value) {
  on->more[on->more_count++] = option;
  on->more[on->more_count++] = value;
}

/* What the disturbed run is started with, beside: nobody is lost in the other one, so that nothing is to be survived,
 * and a script that fails by itself is told at once. */
static even_status make_more(even_chaos_command *on) {
  const char *recovery = on->job.recovery;
  bool replaces = strcmp(recovery, "replace") == 0;
  (void)snprintf(on->restarts, sizeof on->restarts, "%" PRId64, 2 * on->count + 3); /* a stolen port costs two */
  add_more(on, "--max-restarts", on->restarts);
  on->recovers = strcmp(recovery, "restart") != 0;
  if (!on->recovers) {
    return on->job.spares == NULL && on->job.min_ranks == 0
               ? EVEN_OK
               : even_fail(EVEN_ERR_USAGE, "chaos: --spares and --min-ranks are of --recovery shrink and replace");
  }
  char *end = NULL;
  on->spares = on->job.spares == NULL ? 0 : strtol(on->job.spares, &end, 10);
  if (!replaces && strcmp(recovery, "shrink") != 0) {
    (void)even_fail(EVEN_ERR_USAGE, "chaos: --recovery %.100s is no way to go on", recovery);
    return even_error_fix("restart, shrink or replace");
  }
  if ((end != NULL && *end != '\0') || on->spares < 0 || on->spares > MOST_SPARES || (on->spares > 0 && !replaces)) {
    (void)even_fail(EVEN_ERR_USAGE, "chaos: --spares %.100s", on->job.spares);
    return even_error_fix("a number of them, %d at most, with --recovery replace", MOST_SPARES);
  }
  add_more(on, "--recovery", recovery);
  on->more[on->more_count++] = "--whole-history";
  if (on->job.spares != NULL) {
    add_more(on, "--spares", on->job.spares);
  }
  if (on->job.min_ranks > 0) {
    (void)snprintf(on->least, sizeof on->least, "%lld", (long long)on->job.min_ranks);
    add_more(on, "--min-ranks", on->least);
  }
  return EVEN_OK;
}

/* Who leads while the first one lives has that folder, by which it is found (chaos_leader.c). */
static even_status check_beside(const even_chaos_command *on) {
  even_text beside = EVEN_TEXT_EMPTY;
  even_text_format(&beside, "%s/%s.1", on->job.runs_folder, on->names[1]);
  even_status status = even_text_status(&beside);
  if (status == EVEN_OK && even_path_exists(even_text_string(&beside))) {
    status = even_fail(EVEN_ERR_USAGE, "chaos: %.300s is there already, of an earlier job", even_text_string(&beside));
    (void)even_error_fix("give another --name, or remove that folder");
  }
  even_text_free(&beside);
  return status;
}

static const char *why_without_cuts(const even_chaos_command *on) {
  return even_chaos_has_own_hosts(on) ? "links of hosts of your own are not cut, by which they may be reached"
                                      : "one host has no link that could be cut";
}

/* Of a job on one host, or on hosts of the user's own. */
static even_status leave_out_cuts(even_chaos_command *on) {
  const uint32_t cut = (uint32_t)1 << EVEN_CHAOS_CUT;
  if (on->namespaces || (on->kinds_set & cut) == 0) {
    return EVEN_OK;
  }
  if (on->kinds_set == cut) {
    (void)even_fail(EVEN_ERR_USAGE, "chaos: %s", why_without_cuts(on));
    return even_error_fix("--namespaces runs the job on several hosts of this machine (root)");
  }
  on->kinds_set &= ~cut;
  on->without_cuts = true;
  return EVEN_OK;
}

/* -n, 0 where it is no number. */
static int said_ranks(const even_chaos_command *on) {
  char *end = NULL;
  long said = on->job.ranks == NULL ? 0 : strtol(on->job.ranks, &end, 10);
  return said < 1 || said > INT_MAX / EVEN_CHAOS_HOSTS || *end != '\0' ? 0 : (int)said;
}

static even_status prepare(even_chaos_command *on, size_t count, char **words) {
  uint64_t now = even_clock_wall_ns();
  char chosen[32];
  EVEN_TRY(even_chaos_parse(on->kinds, &on->kinds_set));
  EVEN_TRY(even_chaos_check_options(on));
  EVEN_TRY(leave_out_cuts(on));
  if (!(on->hold > 0 && on->hold <= 3600)) {
    return even_fail(EVEN_ERR_USAGE, "chaos: --hold must be more than 0 s, and an hour at most");
  }
  if (!(on->tolerance >= 0)) {
    return even_fail(EVEN_ERR_USAGE, "chaos: --tolerance must not be negative");
  }
  on->hosts = on->hosts == 0 ? 2 : on->hosts;
  if (on->replace_leader && !(on->namespaces && on->hosts == EVEN_CHAOS_HOSTS)) {
    (void)even_fail(EVEN_ERR_USAGE, "chaos: --replace-leader is of three hosts");
    return even_error_fix("add --namespaces --hosts 3 (root)");
  }
  if (on->restart_agent && on->replace_leader) {
    (void)even_fail(EVEN_ERR_USAGE, "chaos: --restart-agent goes on with the agent that --replace-leader replaces");
    return even_error_fix("give one of them");
  }
  on->seed = on->seed < 0 ? (int64_t)(now / 1000u % 1000000000u) : on->seed;
  (void)snprintf(chosen, sizeof chosen, "chaos-%" PRIu64, now / 1000000000u);
  const char *name = on->job.name == NULL ? chosen : on->job.name;
  if (strlen(name) > 128 || strchr(name, '/') != NULL) {
    return even_fail(EVEN_ERR_USAGE, "chaos: \"%.200s\" cannot name a run", name);
  }
  if (on->against != NULL && (strlen(on->against) > 150 || strchr(on->against, '/') != NULL)) {
    return even_fail(EVEN_ERR_USAGE, "chaos: --against \"%.200s\" cannot name a run", on->against);
  }
  if (on->against == NULL) {
    (void)snprintf(on->names[0], sizeof on->names[0], "%s-undisturbed", name);
  } else {
    (void)snprintf(on->names[0], sizeof on->names[0], "%s", on->against);
  }
  (void)snprintf(on->names[1], sizeof on->names[1], "%s-disturbed", name);
  EVEN_TRY(on->replace_leader ? check_beside(on) : EVEN_OK);
  if (on->namespaces) {
    EVEN_TRY(even_chaos_network_open(&on->network, (int)on->hosts));
  }
  if (even_chaos_has_own_hosts(on)) { /* one that cannot be reached is told before a whole training is made */
    EVEN_TRY(even_chaos_hosts_read(&on->job, said_ranks(on), &on->own));
    EVEN_TRY(even_chaos_hosts_open(&on->job, &on->own));
    even_chaos_hosts_end(&on->own);
  }
  EVEN_TRY(make_more(on));
  EVEN_TRY(even_chaos_make_words(on, count, words));
  EVEN_TRY(EVEN_NEW_ARRAY(&on->plan, (size_t)on->count));
  return EVEN_NEW_ARRAY(&on->done, (size_t)on->count);
}

static even_chaos_job job_of(even_chaos_command *on, int which) {
  return (even_chaos_job){.words = on->words,
                          .word_count = on->word_count,
                          .script = on->script,
                          .name = on->names[which],
                          .runs_folder = on->job.runs_folder,
                          .network = on->namespaces ? &on->network : NULL,
                          .succeeds = on->replace_leader,
                          .hosts = which == 1 && even_chaos_has_own_hosts(on) ? &on->own : NULL,
                          .votes = on->job.witness != NULL,
                          .outlasts = on->restart_agent,
                          .sets_aside = on->job.set_aside,
                          .patience_ns = UINT64_MAX};
}

/* A run of before may have had another number of them than -n says, or --hosts does. */
static int own_ranks(const even_chaos_command *on, int ranks) {
  const int said = said_ranks(on);
  if (even_chaos_has_own_hosts(on)) {
    return on->own.ranks > 0 ? on->own.ranks : ranks;
  }
  return said == 0 ? ranks : on->namespaces ? (int)on->hosts * said : said;
}

/* One of before, which has ended well. */
static even_status look_at_undisturbed(even_chaos_command *on, int *ranks, long *steps) {
  even_text folder = EVEN_TEXT_EMPTY;
  even_history *history = NULL;
  even_text_format(&folder, "%s/%s", on->job.runs_folder, on->names[0]);
  even_status status = even_text_status(&folder);
  status = status == EVEN_OK ? even_history_open(even_text_string(&folder), &history) : status;
  even_text_free(&folder);
  EVEN_TRY(status);
  const even_state *state = even_history_state(history);
  *ranks = state->ranks;
  *steps = state->last_step + 1;
  on->seconds[0] = (double)(state->ended_ns - state->started_ns) * 1e-9;
  if (!even_history_ended(history) || state->exit_code != 0 || *steps < 1) {
    status = even_fail(EVEN_ERR_INPUT, "%s did not end well, so nothing can be compared with it", on->names[0]);
  }
  even_history_close(history);
  return status;
}

/* Of the run that nothing disturbs: whatever goes wrong is the job's own. */
static even_status run_undisturbed(even_chaos_command *on, int *ranks, long *steps) {
  even_chaos_job job = job_of(on, 0);
  uint64_t began = even_clock_ns();
  even_status status = even_chaos_run(&job);
  on->seconds[0] = (double)(even_clock_ns() - began) * 1e-9;
  *steps = even_chaos_last_step(&job) + 1;
  *ranks = job.history == NULL ? 0 : even_history_state(job.history)->ranks;
  if (status == EVEN_OK && job.exit_code < 0) { /* it told no end */
    status = even_fail(EVEN_ERR_INPUT, "%s did not begin: %.300s", job.name, job.complaint);
    (void)(job.fix[0] != '\0' ? even_error_fix("%s", job.fix) : status);
  } else if (status == EVEN_OK && job.exit_code != 0) {
    status = even_fail(EVEN_ERR_RANK_FAILED, "%s fails without any fault (exit code %d): %.300s", job.name,
                       job.exit_code, job.complaint);
    (void)even_error_fix("%s/logs has what its ranks said; the script has to come to its end undisturbed",
                         even_text_string(&job.folder));
  } else if (status == EVEN_OK && *steps < 1) {
    status = even_fail(EVEN_ERR_INPUT, "%s made no step that could be seen", job.name);
    (void)even_error_fix("the script must use es.prepare and train for more than a second");
  }
  even_chaos_close(&job);
  return status;
}

static void break_promise(even_chaos_command *on, const char *why) {
  if (on->broken[0] == '\0') {
    (void)snprintf(on->broken, sizeof on->broken, "%s", why);
  }
}

static even_status run_disturbed(even_chaos_command *on, int ranks, long steps) {
  /* each fault may cost a restart, and the training from its beginning */
  const double patience = 120 + on->seconds[0] * (double)(on->count + 2);
  even_chaos_job job = job_of(on, 1);
  char why[768];
  job.plan = on->plan;
  job.done = on->done;
  job.faults = (size_t)on->count;
  job.steps = steps;
  job.ranks = ranks;
  job.places = ranks + (int)on->spares;
  job.more = on->more;
  job.more_count = on->more_count;
  job.recovers = on->recovers;
  job.replaces = strcmp(on->job.recovery, "replace") == 0;
  job.usual_ns = (uint64_t)(on->seconds[0] * 1e9);
  job.hold_ns = (uint64_t)(on->hold * 1e9);
  job.patience_ns = (uint64_t)(patience * 1e9);
  if (job.hosts != NULL) {
    EVEN_TRY(even_chaos_hosts_open(&on->job, job.hosts));
  }
  uint64_t began = even_clock_ns();
  even_status status = even_chaos_run(&job);
  on->seconds[1] = (double)(even_clock_ns() - began) * 1e-9;
  if (status == EVEN_ERR_TIMEOUT) {
    break_promise(on, even_error_last()->what);
    status = EVEN_OK;
  } else if (status == EVEN_OK && job.exit_code != 0) {
    (void)snprintf(why, sizeof why, "the disturbed run ended with exit code %d: %.400s", job.exit_code, job.complaint);
    break_promise(on, why);
  }
  if (job.wrong[0] != '\0') {
    break_promise(on, job.wrong);
  }
  even_chaos_close(&job);
  even_chaos_hosts_end(&on->own);
  for (int64_t i = 0; i < on->count; i++) {
    if (on->done[i].broken) {
      (void)snprintf(why, sizeof why, "%s: %s", even_chaos_name(on->plan[i].kind), on->done[i].words);
      break_promise(on, why);
    }
  }
  return status;
}

/* The words of such a fault begin with the checkpoint's name. */
static bool is_spoiled(const void *context, const char *name) {
  const even_chaos_command *on = context;
  const size_t length = strlen(name);
  for (int64_t i = 0; i < on->count; i++) {
    const bool its = on->plan[i].kind == EVEN_CHAOS_FLIP || on->plan[i].kind == EVEN_CHAOS_TORN;
    if (its && on->done[i].injected && strncmp(on->done[i].words, name, length) == 0 &&
        on->done[i].words[length] == ':') {
      return true;
    }
  }
  return false;
}

static even_status compare(even_chaos_command *on) {
  even_text folders[2] = {EVEN_TEXT_EMPTY, EVEN_TEXT_EMPTY};
  char why[768];
  for (int i = 0; i < 2; i++) {
    even_text_format(&folders[i], "%s/%s", on->job.runs_folder, on->names[i]);
  }
  even_status status = even_text_status(&folders[0]);
  status = status == EVEN_OK ? even_text_status(&folders[1]) : status;
  if (status == EVEN_OK) {
    status =
        even_chaos_compare(even_text_string(&folders[0]), even_text_string(&folders[1]), is_spoiled, on, &on->verdict);
  }
  const even_chaos_verdict *verdict = &on->verdict;
  if (status == EVEN_OK && verdict->step[0] != verdict->step[1]) {
    (void)snprintf(why, sizeof why, "the runs ended at different steps: %" PRId64 " and %" PRId64, verdict->step[0],
                   verdict->step[1]);
    break_promise(on, why);
  } else if (status == EVEN_OK && verdict->different > 0 && !(verdict->largest <= on->tolerance)) {
    const char *hint =
        (on->recovers || on->job.set_aside) && on->tolerance <= 0
            ? "; those that are left add in another order: give --tolerance 1e-5 (fp32) or 1e-12 (fp64), or "
              "train with exact=\"bitwise\""
            : "";
    (void)snprintf(why, sizeof why, "%" PRIu64 " numbers differ, most in %.200s: relative norm %.3g, %.3g is allowed%s",
                   verdict->different, verdict->where, verdict->largest, on->tolerance, hint);
    break_promise(on, why);
  }
  even_text_free(&folders[0]);
  even_text_free(&folders[1]);
  return status;
}

/* The leader is lost first: only then do the others surely vote, and all other faults come under the next one. */
static void lose_leader_first(even_chaos_fault *plan, size_t count) {
  for (size_t i = 0; i < count; i++) {
    if (plan[i].kind == EVEN_CHAOS_AGENT || even_chaos_cuts_leader(&plan[i])) {
      even_chaos_fault lost = plan[i];
      lost.when = plan[0].when;
      memmove(&plan[1], &plan[0], i * sizeof *plan);
      plan[0] = lost;
      return;
    }
  }
}

/* Which of the kinds come to this host alone, and why. */
static void tell_of_this_host(const even_chaos_command *on) {
  const uint32_t shared = (uint32_t)1 << EVEN_CHAOS_CLOCK | (uint32_t)1 << EVEN_CHAOS_NAN;
  const uint32_t disk = (uint32_t)1 << EVEN_CHAOS_DISK;
  if (!even_chaos_has_own_hosts(on)) {
    return;
  }
  if ((on->kinds_set & shared) != 0) {
    even_chaos_say(on,
                   "clock and nan come to ranks and agent of this host: processes of others do not see its memory\n");
  }
  if ((on->kinds_set & disk) != 0) {
    even_chaos_say(on, "full-disk comes to this host, whose disk has the run\n");
  }
}

static even_status disturb(even_chaos_command *on) {
  int ranks = 0;
  long steps = 0;
  if (on->without_cuts) {
    even_chaos_say(on, "partition is left out: %s (--namespaces makes several)\n", why_without_cuts(on));
  }
  tell_of_this_host(on);
  EVEN_TRY(on->against == NULL ? run_undisturbed(on, &ranks, &steps) : look_at_undisturbed(on, &ranks, &steps));
  ranks = own_ranks(on, ranks);
  even_chaos_say(on, "undisturbed: %ld steps on %d rank%s, %.1f s\n", steps, ranks, ranks == 1 ? "" : "s",
                 on->seconds[0]);
  even_chaos_say(on, "%" PRId64 " faults, seed %" PRId64 ":\n", on->count, on->seed);
  even_chaos_plan((uint64_t)on->seed, on->kinds_set, ranks + (int)on->spares, (size_t)on->count, on->plan);
  if (on->replace_leader) {
    lose_leader_first(on->plan, (size_t)on->count);
  }
  EVEN_TRY(run_disturbed(on, ranks, steps));
  if (on->broken[0] == '\0') {
    EVEN_TRY(compare(on));
  }
  return even_chaos_report(on, steps);
}

static int run(even_chaos_command *on, size_t count, char **words) {
  even_status status = prepare(on, count, words);
  if (status == EVEN_OK) {
    status = disturb(on);
  }
  int code = status != EVEN_OK ? even_cli_fail_of(status) : on->broken[0] == '\0' ? 0 : EXIT_BROKEN;
  even_free(on->verdict.paths[0]);
  even_free(on->verdict.paths[1]);
  even_chaos_network_close(&on->network);
  even_chaos_hosts_close(&on->own);
  even_free(on->plan);
  even_free(on->done);
  even_text_free(&on->program);
  return code;
}

int even_cli_chaos(int argc, char **argv) {
  static even_chaos_command on; /* thousands of words */
  even_option table[EVEN_CHAOS_OPTION_ROOM];
  int operand = 0;
  int code = 0;
  on = (even_chaos_command){.seed = -1, .count = 3, .kinds = "all", .hold = 5};
  even_job_options_defaults(&on.job);
  on.job.policy = "equal";
  on.job.checkpoint_every = "10";
  size_t count = even_chaos_declare(&on, table);
  if (!even_cli_begin(&usage, table, count, argc, argv, -1, NULL, &operand, &code)) {
    return code;
  }
  if (on.part) {
    return even_chaos_serve();
  }
  if (operand >= argc) {
    (void)even_fail(EVEN_ERR_USAGE, "chaos: no script was given");
    (void)even_error_fix("evenstep chaos [options] script.py [arguments]");
    return even_cli_fail();
  }
  (void)unsetenv("EVENSTEP_CHECKPOINT_TO"); /* its trainings are no one's, and do not belong among those kept there */
  return run(&on, (size_t)(argc - operand), argv + operand);
}
