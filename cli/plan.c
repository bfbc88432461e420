/* evenstep plan: runs a few measuring steps of a training and predicts shares, step time and memory. */
#include "base/fail.h"
#include "cli/job.h"
#include "cli/plan_file.h"
#include "os/file.h"
#include "os/folder.h"
#include "os/path.h"
#include "os/thread.h"

#include <inttypes.h>
#include <string.h>

typedef struct plan_command {
  even_job_options job;
  const char *output;
  int64_t steps;
  bool json;
  even_text path;     /* of the plan, absolute */
  even_text measured; /* where the ranks write it: a plan of an earlier run stays until this one is whole */
} plan_command;

static const even_usage usage = {
    .command = "plan",
    .synopsis = "evenstep plan [options] script.py [arguments]",
    .description =
        "Starts the job as `evenstep run` does, all ranks at once, trains a few steps at several splits of the\n"
        "batch, ends it, and predicts each rank's share, time and memory, and whether steps are\n"
        "shorter without some ranks. Nothing is saved but the plan; `evenstep report --plan` compares it with\n"
        "what came.",
    .epilogue =
        "exit codes:\n"
        "  0 the plan was written; 3 the script ended before enough steps; else as of `evenstep run`\n"
        "\n"
        "example:\n"
        "  evenstep plan -n 2 --cpu-quota 1:0.25 -o plan.json train.py",
    .stop_at_operand = true,
};

static even_status find_paths(plan_command *plan) {
  EVEN_TRY(even_cli_check_output(plan->output));
  EVEN_TRY(even_path_absolute(plan->output, &plan->path));
  even_text_format(&plan->measured, "%s.%ld", even_text_string(&plan->path), (long)even_own_process());
  return even_text_status(&plan->measured);
}

/* The ranks' environment; exit code of the job. */
static int measure(plan_command *plan, size_t count, char **words) {
  even_text file = EVEN_TEXT_EMPTY;
  char steps[64];
  even_text_format(&file, "EVENSTEP_PLAN=%s", even_text_string(&plan->measured));
  (void)snprintf(steps, sizeof steps, "EVENSTEP_PLAN_STEPS=%" PRId64, plan->steps);
  if (even_text_status(&file) != EVEN_OK) {
    even_text_free(&file);
    return even_cli_fail();
  }
  char *environment[] = {file.data, steps, NULL};
  int code = even_job_start(&plan->job, environment, count, words);
  even_text_free(&file);
  return code;
}

static even_status show(const plan_command *plan) {
  even_plan result;
  const char *measured = even_text_string(&plan->measured);
  if (!even_path_exists(measured)) {
    (void)even_fail(EVEN_ERR_INPUT, "plan: the script ended before its %" PRId64 " measuring steps", plan->steps);
    return even_error_fix(
        "train longer than that, or fewer with --steps (at least 4); "
        "the model, optimizer and loader must go through es.prepare");
  }
  even_status status = even_plan_read(measured, &result);
  if (status == EVEN_OK) {
    status = even_file_rename(measured, even_text_string(&plan->path));
  }
  if (status == EVEN_OK && plan->json) {
    even_text text = EVEN_TEXT_EMPTY;
    status = even_file_read(even_text_string(&plan->path), 64U << 20, &text);
    (void)fputs(even_text_string(&text), stdout);
    even_text_free(&text);
  } else if (status == EVEN_OK) {
    even_plan_print(&result, plan->job.hosts == NULL);
    (void)printf("The plan is in %s; `evenstep report --plan` compares it with a run.\n", plan->output);
  }
  even_plan_free(&result);
  return status;
}

static int run(plan_command *plan, size_t count, char **words) {
  even_status status = find_paths(plan);
  if (status != EVEN_OK) {
    return even_cli_fail_of(status);
  }
  int code = measure(plan, count, words);
  if (code == 0 && (status = show(plan)) != EVEN_OK) {
    code = even_cli_fail_of(status);
  }
  if ((status = even_file_remove(even_text_string(&plan->measured))) != EVEN_OK && code == 0) {
    code = even_cli_fail_of(status);
  }
  return code;
}

/* What a plan decides itself: one attempt, no page, no words but its own. */
static size_t leave_out(even_option *table, size_t count) {
  static const char *const not_of_a_plan[] = {
      "max-restarts",       "recovery",        "spares",         "min-ranks",    "port",         "no-monitor",
      "whole-history",      "timeline",        "timeline-calls", "hang-timeout", "on-hang",      "on-nonfinite",
      "check-parameters",   "on-difference",   "batch-adapt",    "quiet",        "on-straggler", "straggler-gain",
      "straggler-patience", "straggler-watch", "link-watch",     "gpu-watch"};
  size_t kept = 0;
  for (size_t i = 0; i < count; i++) {
    bool decided = false;
    for (size_t k = 0; k < sizeof not_of_a_plan / sizeof not_of_a_plan[0]; k++) {
      decided = decided || strcmp(table[i].name, not_of_a_plan[k]) == 0;
    }
    if (!decided) {
      table[kept++] = table[i];
    }
  }
  return kept;
}

int even_cli_plan(int argc, char **argv) {
  plan_command plan = {.output = "plan.json", .steps = 8};
  enum { COUNT = EVEN_JOB_OPTION_ROOM + 2 };
  even_option table[COUNT];
  int operand = 0;
  int code = 0;
  even_job_options_defaults(&plan.job);
  plan.job.log_rank = "none";
  size_t count = leave_out(table, even_job_options_declare(&plan.job, table));
  table[count++] = (even_option){
      'o', "output", EVEN_OPTION_TEXT, &plan.output, "FILE", "where the plan is written (default plan.json)", 0, 0};
  table[count++] =
      (even_option){0, "steps", EVEN_OPTION_INTEGER, &plan.steps, "N", "measuring steps (default 8)", 4, 10000};
  if (!even_cli_begin(&usage, table, count, argc, argv, -1, NULL, &operand, &code)) {
    return code;
  }
  if (operand >= argc) {
    (void)even_fail(EVEN_ERR_USAGE, "plan: no script was given");
    (void)even_error_fix("evenstep plan [options] script.py [arguments]");
    return even_cli_fail();
  }
  plan.json = plan.job.json;
  plan.job.json = false; /* the plan is the object that is asked for, not the job's outcome */
  plan.job.quiet = true;
  plan.job.no_monitor = true;
  plan.job.max_restarts = 0;
  code = run(&plan, (size_t)(argc - operand), argv + operand);
  even_text_free(&plan.path);
  even_text_free(&plan.measured);
  return code;
}
