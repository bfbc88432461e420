/* evenstep bench balance: what each way of sharing work out reaches on unequal devices: real trainings on this host's
 * cores, which are made unequal, and simulated ones on more and on changing devices. */
#include "cli/bench_balance.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "cli/bench.h"
#include "cli/job.h"
#include "cli/quota.h"
#include "monitor/page.h"
#include "os/file.h"
#include "os/folder.h"
#include "os/path.h"
#include "os/thread.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { LARGEST_REPORT = 64 << 20, MOST_RANKS = 64, MOST_WORDS = 40, KEPT_OPTIONS = 5, OWN_OPTIONS = 18 };

typedef struct balance_bench {
  even_job_options job;
  const char *policies, *speeds, *courses, *only, *csv, *plots, *output, *slowed;
  const char *model, *sizes, *data, *batch_norm;
  int64_t rounds, batch;
  double seconds;
  bool no_peers, quick, json;
  size_t ranks;
  even_bench_plan plan;
  even_text simulated; /* files: what was simulated, … */
  even_text measured;  /* … and what rank 0 writes */
  even_text quota;
} balance_bench;

static const even_usage usage = {
    .command = "bench balance",
    .synopsis =
        "evenstep bench balance [-n N] [--model NAME] [--speeds LIST] [--policies LIST] [--csv FILE] [--plots DIR] "
        "[--json]",
    .description =
        "Trains a model (a small GPT-2) on this host's cores, made unequal by CPU quotas (or by busy neighbours where "
        "none are\n"
        "permitted), with each policy, on one device, with plain PyTorch (equal, and a split tuned by hand), and\n"
        "compares with the best split at the speeds that the ranks have while all of them run. Slows a rank down in\n"
        "mid-run, lets one drift, gives it its speed in bursts, and disturbs all by noise. Then, in the simulator, 2 "
        "to 5\n"
        "ranks, drifting and bursty speeds, and a mix of cards. What was simulated says so. About 40 minutes\n"
        "(it says how long each part takes); leave the machine alone meanwhile.",
    .epilogue =
        "exit codes:\n"
        "  0 measured; else as of `evenstep run`\n"
        "\n"
        "examples:\n"
        "  evenstep bench balance --csv balance.csv --plots plots\n"
        "  evenstep bench balance --only simulated\n"
        "  evenstep bench balance --speeds 4:1 --policies equal,auto --rounds 8\n"
        "  evenstep bench balance -n 4 --only real --courses drifting,bursty\n"
        "  evenstep bench balance --only real --model resnet50 --data cifar-10-batches-bin --courses steady",
};

static even_status check_only(const balance_bench *on) {
  if (strcmp(on->only, "both") == 0 || strcmp(on->only, "real") == 0 || strcmp(on->only, "simulated") == 0) {
    return EVEN_OK;
  }
  (void)even_fail(EVEN_ERR_USAGE, "bench balance: --only %s is neither real nor simulated", on->only);
  return even_error_fix("--only real, --only simulated, or leave it out");
}

static even_status check_slowed(const balance_bench *on) {
  if (strcmp(on->slowed, "auto") == 0 || strcmp(on->slowed, "quota") == 0 || strcmp(on->slowed, "neighbours") == 0) {
    return EVEN_OK;
  }
  (void)even_fail(EVEN_ERR_USAGE, "bench balance: --slow-by %s is no way to slow a rank", on->slowed);
  return even_error_fix("--slow-by quota, --slow-by neighbours, or leave it out");
}

static even_status check_batch_norm(const balance_bench *on) {
  if (strcmp(on->batch_norm, "sync") == 0 || strcmp(on->batch_norm, "local") == 0) {
    return EVEN_OK;
  }
  (void)even_fail(EVEN_ERR_USAGE, "bench balance: --batch-norm %s is neither sync nor local", on->batch_norm);
  return even_error_fix("--batch-norm local for each rank's own statistics, or leave it out");
}

static even_status check_numbers(balance_bench *on) {
  char *end = NULL;
  long ranks = strtol(on->job.ranks, &end, 10);
  if (*end != '\0' || ranks < 2 || ranks > MOST_RANKS) {
    (void)even_fail(EVEN_ERR_USAGE, "bench balance: -n %s is no number of ranks from 2 to %d", on->job.ranks,
                    MOST_RANKS);
    return even_error_fix("leave it out for two");
  }
  on->ranks = (size_t)ranks;
  if (!(on->seconds >= 0.01) || on->seconds > 3600) {
    (void)even_fail(EVEN_ERR_USAGE, "bench balance: --seconds %g is out of range", on->seconds);
    return even_error_fix("give seconds of a turn, 0.01 to 3600");
  }
  if (on->batch < (int64_t)on->ranks) {
    (void)even_fail(EVEN_ERR_USAGE, "bench balance: --batch %" PRId64 " is less than a sample for each rank",
                    on->batch);
    return even_error_fix("give at least %zu", on->ranks);
  }
  return EVEN_OK;
}

static even_status file_in_runs(const balance_bench *on, const char *kind, even_text *out) {
  even_text relative = EVEN_TEXT_EMPTY;
  even_text_format(&relative, "%s/bench-balance.%ld.%s", on->job.runs_folder, (long)even_own_process(), kind);
  even_status status = even_text_status(&relative);
  if (status == EVEN_OK) {
    status = even_path_absolute(even_text_string(&relative), out);
  }
  even_text_free(&relative);
  return status;
}

static even_status check(balance_bench *on) {
  EVEN_TRY(check_only(on));
  EVEN_TRY(check_slowed(on));
  EVEN_TRY(check_numbers(on));
  EVEN_TRY(even_bench_policies(on->policies, &on->plan));
  EVEN_TRY(even_bench_courses(on->courses));
  EVEN_TRY(even_bench_model(on->model, on->sizes, on->data));
  EVEN_TRY(check_batch_norm(on));
  if (on->speeds != NULL) {
    EVEN_TRY(even_bench_speeds(on->speeds, on->ranks));
  }
  EVEN_TRY(file_in_runs(on, "simulated.json", &on->simulated));
  return file_in_runs(on, "json", &on->measured);
}

static even_status make_plots_folder(const balance_bench *on) {
  if (on->plots == NULL || even_path_is_folder(on->plots)) {
    return EVEN_OK;
  }
  return even_folder_make(on->plots);
}

static even_status simulate(balance_bench *on) {
  even_text text = EVEN_TEXT_EMPTY;
  on->plan.seeds = on->quick ? 1 : EVEN_BENCH_SEEDS;
  on->plan.steps = EVEN_BENCH_STEPS;
  if (strcmp(on->only, "real") == 0) {
    return EVEN_OK;
  }
  even_status status = even_bench_simulate(&on->plan, &text);
  if (status == EVEN_OK && !even_path_is_folder(on->job.runs_folder)) {
    status = even_folder_make(on->job.runs_folder);
  }
  if (status == EVEN_OK) {
    status = even_file_replace(even_text_string(&on->simulated), even_text_string(&text), text.length);
  }
  even_text_free(&text);
  return status;
}

/* Every rank gets a control group of its own, which as yet leaves it its whole core: the ranks set their quotas while
 * they run. */
static even_status prepare_quotas(balance_bench *on) {
  int version = 0;
  bool can = strcmp(on->slowed, "neighbours") != 0 && even_cli_may_limit_cpu(&version);
  if (!can && strcmp(on->slowed, "quota") == 0) {
    (void)even_fail(EVEN_ERR_UNSUPPORTED, "bench balance: no CPU quota is permitted here");
    return even_error_fix("leave --slow-by out, or run where control groups may be made (`evenstep doctor` says how)");
  }
  on->slowed = can ? "quota" : "neighbours";
  for (size_t rank = 0; can && rank < on->ranks; rank++) {
    even_text_format(&on->quota, "%s%zu:0.999", rank > 0 ? "," : "", rank);
  }
  on->job.cpu_quota = can ? even_text_string(&on->quota) : NULL;
  return even_text_status(&on->quota);
}

static int measure(balance_bench *on) {
  char rounds[32];
  char batch[32];
  char seconds[32];
  const char *words[MOST_WORDS];
  size_t count = 0;
  even_text file = EVEN_TEXT_EMPTY;
  bool real = strcmp(on->only, "simulated") != 0;
  (void)snprintf(rounds, sizeof rounds, "%" PRId64, on->rounds);
  (void)snprintf(batch, sizeof batch, "%" PRId64, on->batch);
  (void)snprintf(seconds, sizeof seconds, "%g", on->seconds);
  const char *const always[] = {"evenstep.bench_balance",
                                "--only",
                                on->only,
                                "--policies",
                                on->policies,
                                "--courses",
                                on->courses,
                                "--rounds",
                                rounds,
                                "--batch",
                                batch,
                                "--seconds",
                                seconds,
                                "--slow-by",
                                on->slowed,
                                "--model",
                                on->model,
                                "--batch-norm",
                                on->batch_norm,
                                "--simulated",
                                even_text_string(&on->simulated)};
  memcpy(words, always, sizeof always);
  count = sizeof always / sizeof always[0];
  if (on->speeds != NULL) {
    words[count++] = "--speeds";
    words[count++] = on->speeds;
  }
  if (on->sizes != NULL) {
    words[count++] = "--model-sizes";
    words[count++] = on->sizes;
  }
  if (on->data != NULL) {
    words[count++] = "--data";
    words[count++] = on->data;
  }
  if (on->no_peers) {
    words[count++] = "--no-peers";
  }
  if (on->quick) {
    words[count++] = "--quick";
  }
  if (!real) {
    on->job.ranks = "1"; /* it only writes the figures down */
    on->job.cpu_quota = NULL;
  }
  even_text_format(&file, "EVENSTEP_BENCH_OUT=%s", even_text_string(&on->measured));
  if (even_text_status(&file) != EVEN_OK) {
    even_text_free(&file);
    return even_cli_fail();
  }
  char *environment[] = {file.data, NULL};
  int code = even_job_start(&on->job, environment, count, (char **)(uintptr_t)words);
  even_text_free(&file);
  return code;
}

static even_status read_report(const balance_bench *on, json_t **out) {
  even_text text = EVEN_TEXT_EMPTY;
  const char *path = even_text_string(&on->measured);
  even_status status = even_file_read(path, LARGEST_REPORT, &text);
  if (status == EVEN_OK) {
    status = even_json_parse(path, even_text_string(&text), text.length, out);
  }
  even_text_free(&text);
  return status;
}

static even_status write_page(const balance_bench *on, const char *json) {
  even_text page = EVEN_TEXT_EMPTY;
  even_text path = EVEN_TEXT_EMPTY;
  even_page_of_bench(json, &page);
  even_text_format(&path, "%s/balance.html", on->plots);
  even_status status = even_text_status(&page) != EVEN_OK ? even_text_status(&page) : even_text_status(&path);
  if (status == EVEN_OK) {
    status = even_file_replace(even_text_string(&path), even_text_string(&page), page.length);
  }
  even_text_free(&page);
  even_text_free(&path);
  return status;
}

static even_status write_files(const balance_bench *on, const char *csv, const char *json) {
  if (on->csv != NULL) {
    EVEN_TRY(even_file_replace(on->csv, csv, strlen(csv)));
  }
  if (on->output != NULL) {
    EVEN_TRY(even_file_replace(on->output, json, strlen(json)));
  }
  return on->plots != NULL ? write_page(on, json) : EVEN_OK;
}

/* The table and the CSV are told beside the figures, so that all say the same. */
static even_status show(const balance_bench *on, json_t *report) {
  json_t *table = json_incref(json_object_get(report, "table"));
  json_t *csv = json_incref(json_object_get(report, "csv"));
  even_status status = EVEN_OK;
  if (!json_is_string(table) || !json_is_string(csv)) {
    status = even_fail(EVEN_ERR_INPUT, "%s is no result of this version", even_text_string(&on->measured));
  } else {
    (void)json_object_del(report, "table");
    (void)json_object_del(report, "csv");
    char *text = json_dumps(report, JSON_INDENT(1) | JSON_REAL_PRECISION(9));
    if (text == NULL) {
      status = even_fail(EVEN_ERR_MEMORY, "the report needs more memory than there is");
    } else {
      status = write_files(on, json_string_value(csv), text);
      (void)printf("%s\n", on->json ? text : json_string_value(table));
    }
    free(text);
  }
  json_decref(table);
  json_decref(csv);
  return status;
}

static int run(balance_bench *on) {
  json_t *report = NULL;
  even_status status = check(on);
  status = status == EVEN_OK ? even_cli_check_output(on->csv) : status;
  status = status == EVEN_OK ? even_cli_check_output(on->output) : status;
  status = status == EVEN_OK ? make_plots_folder(on) : status;
  status = status == EVEN_OK ? prepare_quotas(on) : status;
  status = status == EVEN_OK ? simulate(on) : status;
  if (status != EVEN_OK) {
    return even_cli_fail_of(status);
  }
  int code = measure(on);
  if (code != 0 && !even_path_exists(even_text_string(&on->measured))) {
    return code;
  }
  /* Of a bench that failed or was interrupted, what it had measured. */
  status = read_report(on, &report);
  status = status == EVEN_OK ? show(on, report) : status;
  json_decref(report);
  return status == EVEN_OK ? code : even_cli_fail_of(status);
}

static void remove_file(even_text *path) {
  if (path->length > 0 && even_file_remove(even_text_string(path)) != EVEN_OK) {
    even_error_clear(); /* it stays in the runs folder; the figures are not worse for it */
  }
  even_text_free(path);
}

/* Of a job's options those that mean something here, and our own. */
static size_t declare(balance_bench *on, even_option *table) {
  static const char *const kept[] = {"ranks", "devices", "name", "runs-dir", "python"};
  _Static_assert(sizeof kept / sizeof kept[0] == KEPT_OPTIONS, "options kept and counted");
  size_t count = even_job_options_declare_some(&on->job, kept, KEPT_OPTIONS, table);
  even_job_options_tell_two_ranks(table, count);
  const even_option own[] = {
      {0, "speeds", EVEN_OPTION_TEXT, &on->speeds, "LIST",
       "speeds of the ranks, a case each: 4:1,16:1 (default for two ranks 1:1,2:1,4:1,16:1)", 0, 0},
      {0, "policies", EVEN_OPTION_TEXT, &on->policies, "LIST", "default equal,proportional,dynamic,hybrid,auto", 0, 0},
      {0, "courses", EVEN_OPTION_TEXT, &on->courses, "LIST",
       "of the real ranks' speeds: steady,slowing,drifting,bursty,noise (default all)", 0, 0},
      {0, "only", EVEN_OPTION_TEXT, &on->only, "WHAT", "real or simulated (default both)", 0, 0},
      {0, "slow-by", EVEN_OPTION_TEXT, &on->slowed, "WAY",
       "quota or neighbours (default: quotas where they are permitted)", 0, 0},
      {0, "model", EVEN_OPTION_TEXT, &on->model, "NAME",
       "simplecnn, resnet50, bert or gpt2 (default), scaled down for cores", 0, 0},
      {0, "model-sizes", EVEN_OPTION_TEXT, &on->sizes, "LIST",
       "other sizes of it, layers=2,width=64 say, or `published`", 0, 0},
      {0, "data", EVEN_OPTION_TEXT, &on->data, "PATH",
       "CIFAR-10 or CIFAR-100 (binary version) instead of synthetic images", 0, 0},
      {0, "batch-norm", EVEN_OPTION_TEXT, &on->batch_norm, "WAY", "sync (default) or local", 0, 0},
      {0, "rounds", EVEN_OPTION_INTEGER, &on->rounds, "N",
       "rounds in which all take turns, of which the medians are taken (4)", 1, 10000},
      {0, "seconds", EVEN_OPTION_NUMBER, &on->seconds, "S", "seconds of a turn (2.4)", 0, 0},
      {0, "batch", EVEN_OPTION_INTEGER, &on->batch, "N", "global batch (64)", 2, 1000000},
      {0, "no-peers", EVEN_OPTION_FLAG, &on->no_peers, NULL, "without plain PyTorch (DDP over Gloo)", 0, 0},
      {0, "quick", EVEN_OPTION_FLAG, &on->quick, NULL, "a short look, to see that it works: no figures to keep", 0, 0},
      {0, "csv", EVEN_OPTION_TEXT, &on->csv, "FILE", "also write the figures there, a line each", 0, 0},
      {0, "plots", EVEN_OPTION_TEXT, &on->plots, "DIR", "also draw them: DIR/balance.html, which needs nothing else", 0,
       0},
      {'o', "output", EVEN_OPTION_TEXT, &on->output, "FILE", "also write the figures there, as JSON", 0, 0},
      {0, "json", EVEN_OPTION_FLAG, &on->json, NULL, "print the figures as JSON instead of a table", 0, 0},
  };
  _Static_assert(sizeof own / sizeof own[0] == OWN_OPTIONS, "options declared and counted");
  memcpy(table + count, own, sizeof own);
  return count + OWN_OPTIONS;
}

int even_bench_balance(int argc, char **argv) {
  balance_bench on = {.policies = "equal,proportional,dynamic,hybrid,auto",
                      .courses = "steady,slowing,drifting,bursty,noise",
                      .model = "gpt2",
                      .batch_norm = "sync",
                      .only = "both",
                      .slowed = "auto",
                      .rounds = 4,
                      .batch = 64,
                      .seconds = 2.4};
  even_option table[KEPT_OPTIONS + OWN_OPTIONS];
  int operand = 0;
  int code = 0;
  even_job_options_defaults(&on.job);
  on.job.ranks = "2";
  size_t count = declare(&on, table);
  if (!even_cli_begin(&usage, table, count, argc, argv, 0, "evenstep bench balance [options]", &operand, &code)) {
    return code;
  }
  on.job.module = true;
  on.job.quiet = true;
  on.job.no_monitor = true;
  on.job.max_restarts = 0;
  on.job.log_rank = "0"; /* its progress */
  code = run(&on);
  remove_file(&on.simulated);
  remove_file(&on.measured);
  even_text_free(&on.quota);
  return code;
}
